package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const pluginSocket = "gristmill-fake-gpu.sock"

// gpuPlugin offers devices that do not exist by the real device-plugin
// protocol, so that scheduling, admission, allocation and health are the
// kubelet's own. A container finds the devices it got in GRISTMILL_FAKE_GPUS.
type gpuPlugin struct {
	api.UnimplementedDevicePluginServer
	count  int
	broken string // a file with the IDs of the unhealthy devices, one a line
}

func gpuPluginMain() {
	resource := flag.String("resource", "nvidia.com/gpu", "resource name")
	count := flag.Int("count", 8, "devices")
	broken := flag.String("broken", "", "file that names the unhealthy devices")
	flag.Parse()
	ctx, stop := untilSignalled()
	defer stop()
	plugin := &gpuPlugin{count: *count, broken: *broken}
	// The kubelet empties its plugin folder at every start: serve and register anew each time.
	for ctx.Err() == nil {
		if err := plugin.serveUntilKubeletRestarts(ctx, *resource); err != nil {
			fmt.Fprintln(os.Stderr, "gpuplugin:", err)
		}
		time.Sleep(300 * time.Millisecond)
	}
}

func (p *gpuPlugin) serveUntilKubeletRestarts(ctx context.Context, resource string) error {
	kubelet, err := os.Stat(api.KubeletSocket)
	if err != nil {
		return err
	}
	path := filepath.Join(api.DevicePluginPath, pluginSocket)
	_ = os.Remove(path)
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, p)
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()
	if err := register(ctx, resource); err != nil {
		return err
	}
	fmt.Println("registered", resource)
	for ctx.Err() == nil {
		now, err := os.Stat(api.KubeletSocket)
		if err != nil || !os.SameFile(now, kubelet) {
			return nil
		}
		if _, err := os.Stat(path); err != nil {
			return nil
		}
		time.Sleep(300 * time.Millisecond)
	}
	return nil
}

func register(ctx context.Context, resource string) error {
	connection, err := grpc.NewClient("unix://"+api.KubeletSocket,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	_, err = api.NewRegistrationClient(connection).Register(ctx, &api.RegisterRequest{
		Version: api.Version, Endpoint: pluginSocket, ResourceName: resource})
	return err
}

func (p *gpuPlugin) devices() []*api.Device {
	content, _ := os.ReadFile(p.broken) // no file: all are healthy
	broken := map[string]bool{}
	for _, id := range strings.Fields(string(content)) {
		broken[id] = true
	}
	devices := make([]*api.Device, p.count)
	for i := range devices {
		devices[i] = &api.Device{ID: fmt.Sprintf("gpu-%d", i), Health: api.Healthy}
		if broken[devices[i].ID] {
			devices[i].Health = api.Unhealthy
		}
	}
	return devices
}

func (p *gpuPlugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p *gpuPlugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	last := ""
	for stream.Context().Err() == nil {
		devices := p.devices()
		if state := fmt.Sprint(devices); state != last {
			if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
				return err
			}
			last = state
		}
		time.Sleep(200 * time.Millisecond)
	}
	return nil
}

func (p *gpuPlugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{
			Envs: map[string]string{"GRISTMILL_FAKE_GPUS": strings.Join(container.DevicesIds, ",")}})
	}
	return response, nil
}
