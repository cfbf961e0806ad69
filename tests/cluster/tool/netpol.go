package main

import (
	"context"
	"flag"

	"k8s.io/client-go/informers"
	"k8s.io/klog/v2"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"
)

// policyAgentMain runs kube-network-policies with a kubeconfig, which its own
// program lacks. On a kernel without CONFIG_NFT_QUEUE the agent cannot install
// its nft rules; it logs that and goes on reading the queue, which the cluster
// fills by iptables rules.
func policyAgentMain() {
	klog.InitFlags(nil)
	kubeconfig := flag.String("kubeconfig", "", "path")
	node := flag.String("node", "", "name of this node")
	queue := flag.Int("queue", 98, "NFQUEUE number")
	flag.Parse()
	ctx, stop := untilSignalled()
	defer stop()
	if err := runPolicyAgent(ctx, *kubeconfig, *node, *queue); err != nil {
		fail("netpol", err)
	}
}

func runPolicyAgent(ctx context.Context, kubeconfig, node string, queue int) error {
	client, err := newClient(kubeconfig, 100)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	controller, err := networkpolicy.NewController(client,
		factory.Networking().V1().NetworkPolicies(), factory.Core().V1().Namespaces(), factory.Core().V1().Pods(),
		nil, nil, nil, nil,
		// NRI stays enabled though containerd 1.6 has none (the agent logs that): disabled, v0.8.0
		// dereferences nil on the first packet from an address that is no pod's.
		networkpolicy.Config{QueueID: queue, NodeName: node, FailOpen: false, NRIdisabled: false})
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	return controller.Run(ctx)
}
