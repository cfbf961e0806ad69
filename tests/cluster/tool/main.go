// Command gm-kube is a whole Kubernetes cluster in one binary. Like busybox it
// runs the program whose name it was started by (a symbolic link), so that the
// packages these programs share are compiled and linked once, not ten times.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	_ "time/tzdata"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// programs maps the name a program is started by to what it runs.
var programs = map[string]func(){
	"coredns":                 coreDNS,
	"etcd":                    func() { etcdmain.Main(os.Args) },
	"fakenodes":               fakeNodesMain,
	"gpuplugin":               gpuPluginMain,
	"helm":                    helm,
	"kube-apiserver":          run(apiserver.NewAPIServerCommand),
	"kube-controller-manager": run(controllermanager.NewControllerManagerCommand),
	"kube-proxy":              run(proxy.NewProxyCommand),
	"kube-scheduler":          run(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubectl":                 run(kubectl.NewDefaultKubectlCommand),
	"kubelet":                 run(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
	"netpol":                  policyAgentMain,
	"provisioner":             provisionerMain,
}

// run delays the making of a command: each one registers flags of its own.
func run(build func() *cobra.Command) func() {
	return func() { os.Exit(cli.Run(build())) }
}

func main() {
	name := filepath.Base(os.Args[0])
	if program, ok := programs[name]; ok {
		program()
		return
	}
	names := slices.Sorted(maps.Keys(programs))
	if len(os.Args) == 2 && os.Args[1] == "--names" {
		fmt.Println(strings.Join(names, "\n"))
		return
	}
	fmt.Fprintf(os.Stderr, "gm-kube: %q is none of its programs; link it as one of: %s\n", name, strings.Join(names, ", "))
	os.Exit(2)
}
