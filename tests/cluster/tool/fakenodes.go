package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"time"

	coordination "k8s.io/api/coordination/v1"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
)

const (
	fakeNodeKey = "gristmill.dev/fake-node"
	// A node with this annotation is silent: no heartbeat, and its pods are neither started nor ended.
	silentKey       = "gristmill.dev/fake-node-silent"
	podWorkers      = 16
	heartbeatPeriod = 3 * time.Second
)

// fakeNodes registers nodes that run nothing: a pod bound to one becomes
// Running and Ready after a delay, and goes when it is deleted. They stand in
// for hundreds of kubelets in benchmarks, and for lost nodes in fault tests.
type fakeNodes struct {
	client kubernetes.Interface
	prefix string
	delay  time.Duration
	gpus   resource.Quantity
	taint  bool
	queue  workqueue.TypedDelayingInterface[string]
	pods   cache.Indexer
	nodes  cache.Indexer
	nextIP atomic.Uint32
}

func fakeNodesMain() {
	kubeconfig := flag.String("kubeconfig", "", "path")
	count := flag.Int("nodes", 100, "how many nodes")
	prefix := flag.String("prefix", "fake-", "their names' prefix")
	gpus := flag.String("gpus", "8", "nvidia.com/gpu of each node; 0 for none")
	delay := flag.Duration("delay", 0, "from bound to Running")
	taint := flag.Bool("taint", true, "keep pods without a toleration away")
	flag.Parse()
	ctx, stop := untilSignalled()
	defer stop()
	client, err := newClient(*kubeconfig, 5000)
	if err != nil {
		fail("fakenodes", err)
	}
	fake := &fakeNodes{client: client, prefix: *prefix, delay: *delay, gpus: resource.MustParse(*gpus), taint: *taint,
		queue: workqueue.NewTypedDelayingQueue[string]()}
	for i := range *count {
		if err := fake.register(ctx, fmt.Sprintf("%s%d", *prefix, i)); err != nil {
			fail("fakenodes", err)
		}
	}
	fmt.Printf("registered %d nodes\n", *count)
	fake.watch(ctx)
	go fake.heartbeat(ctx)
	for range podWorkers {
		go fake.work(ctx)
	}
	<-ctx.Done()
	fake.queue.ShutDown()
}

func (f *fakeNodes) register(ctx context.Context, name string) error {
	node := &core.Node{ObjectMeta: meta.ObjectMeta{Name: name, Labels: map[string]string{
		fakeNodeKey: "true", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}}}
	if f.taint {
		node.Spec.Taints = []core.Taint{{Key: fakeNodeKey, Effect: core.TaintEffectNoSchedule}}
	}
	_, err := f.client.CoreV1().Nodes().Create(ctx, node, meta.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	patch, err := json.Marshal(map[string]any{"status": f.nodeStatus()})
	if err != nil {
		return err
	}
	if err := f.renewLease(ctx, name); err != nil { // before Ready, or the node monitor calls it lost
		return err
	}
	_, err = f.client.CoreV1().Nodes().Patch(ctx, name, types.StrategicMergePatchType, patch, meta.PatchOptions{}, "status")
	return err
}

func (f *fakeNodes) nodeStatus() core.NodeStatus {
	resources := core.ResourceList{
		"cpu": resource.MustParse("64"), "memory": resource.MustParse("512Gi"), "pods": resource.MustParse("250"),
		"ephemeral-storage": resource.MustParse("1Ti")}
	if !f.gpus.IsZero() {
		resources["nvidia.com/gpu"] = f.gpus
	}
	now := meta.Now()
	return core.NodeStatus{
		Capacity: resources, Allocatable: resources,
		NodeInfo: core.NodeSystemInfo{KubeletVersion: "v1.37.2", OperatingSystem: "linux", Architecture: "amd64"},
		Conditions: []core.NodeCondition{{Type: core.NodeReady, Status: core.ConditionTrue, Reason: "FakeNode",
			LastHeartbeatTime: now, LastTransitionTime: now}},
	}
}

// heartbeat renews the leases of the nodes that are not silent, for ever.
func (f *fakeNodes) heartbeat(ctx context.Context) {
	for ctx.Err() == nil {
		begin := time.Now()
		for _, name := range f.nodes.ListKeys() {
			if f.silent(name) {
				continue
			}
			if err := f.renewLease(ctx, name); err != nil && ctx.Err() == nil {
				fmt.Fprintln(os.Stderr, "heartbeat:", err)
			}
		}
		time.Sleep(max(0, heartbeatPeriod-time.Since(begin)))
	}
}

func (f *fakeNodes) renewLease(ctx context.Context, name string) error {
	leases := f.client.CoordinationV1().Leases("kube-node-lease")
	lease := &coordination.Lease{ObjectMeta: meta.ObjectMeta{Name: name}, Spec: coordination.LeaseSpec{
		HolderIdentity: &name, LeaseDurationSeconds: ptr.To[int32](40), RenewTime: ptr.To(meta.NowMicro())}}
	// A Lease cannot be updated without its resourceVersion; a merge patch can.
	patch, err := json.Marshal(lease)
	if err != nil {
		return err
	}
	_, err = leases.Patch(ctx, name, types.MergePatchType, patch, meta.PatchOptions{})
	if apierrors.IsNotFound(err) {
		_, err = leases.Create(ctx, lease, meta.CreateOptions{})
	}
	return err
}

func (f *fakeNodes) silent(name string) bool {
	object, known, err := f.nodes.GetByKey(name)
	return err == nil && known && object.(*core.Node).Annotations[silentKey] == "true"
}

// watch fills the caches of nodes and bound pods and queues every pod that has something to become.
func (f *fakeNodes) watch(ctx context.Context) {
	nodes := informers.NewSharedInformerFactoryWithOptions(f.client, 0, informers.WithTweakListOptions(
		func(o *meta.ListOptions) { o.LabelSelector = fakeNodeKey }))
	nodeInformer := nodes.Core().V1().Nodes().Informer()
	pods := informers.NewSharedInformerFactoryWithOptions(f.client, 0, informers.WithTweakListOptions(
		func(o *meta.ListOptions) { o.FieldSelector = "spec.nodeName!=" }))
	podInformer := pods.Core().V1().Pods().Informer()
	f.nodes, f.pods = nodeInformer.GetIndexer(), podInformer.GetIndexer()
	_, _ = podInformer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: f.enqueue, UpdateFunc: func(_, now any) { f.enqueue(now) }})
	_, _ = nodeInformer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		UpdateFunc: func(_, now any) { f.enqueuePodsOf(now.(*core.Node).Name) }}) // it may have found its voice
	nodes.Start(ctx.Done())
	nodes.WaitForCacheSync(ctx.Done())
	pods.Start(ctx.Done())
	pods.WaitForCacheSync(ctx.Done())
}

func (f *fakeNodes) enqueuePodsOf(node string) {
	for _, object := range f.pods.List() {
		if object.(*core.Pod).Spec.NodeName == node {
			f.enqueue(object)
		}
	}
}

func (f *fakeNodes) enqueue(object any) {
	pod, ok := object.(*core.Pod)
	if !ok || !strings.HasPrefix(pod.Spec.NodeName, f.prefix) || f.silent(pod.Spec.NodeName) {
		return
	}
	key := pod.Namespace + "/" + pod.Name
	switch {
	case pod.DeletionTimestamp != nil:
		f.queue.Add(key)
	case pod.Status.Phase == core.PodPending:
		f.queue.AddAfter(key, f.delay)
	}
}

func (f *fakeNodes) work(ctx context.Context) {
	for {
		key, quit := f.queue.Get()
		if quit {
			return
		}
		if err := f.sync(ctx, key); err != nil {
			f.queue.AddAfter(key, time.Second)
		}
		f.queue.Done(key)
	}
}
