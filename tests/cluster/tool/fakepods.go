package main

import (
	"context"
	"encoding/json"
	"fmt"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// sync gives one pod of a fake node what a kubelet would: its end, or its start.
func (f *fakeNodes) sync(ctx context.Context, key string) error {
	object, known, err := f.pods.GetByKey(key)
	if err != nil || !known {
		return err
	}
	pod := object.(*core.Pod)
	switch {
	case f.silent(pod.Spec.NodeName):
		return nil
	case pod.DeletionTimestamp != nil:
		return f.endPod(ctx, pod)
	case pod.Status.Phase == core.PodPending:
		return f.startPod(ctx, pod)
	}
	return nil
}

func (f *fakeNodes) endPod(ctx context.Context, pod *core.Pod) error {
	err := f.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, meta.DeleteOptions{
		GracePeriodSeconds: ptr.To[int64](0), Preconditions: &meta.Preconditions{UID: &pod.UID}})
	return ignoreGone(err)
}

func (f *fakeNodes) startPod(ctx context.Context, pod *core.Pod) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID}, "status": runningStatus(pod, f.podIP())})
	if err != nil {
		return err
	}
	_, err = f.client.CoreV1().Pods(pod.Namespace).Patch(
		ctx, pod.Name, types.StrategicMergePatchType, patch, meta.PatchOptions{}, "status")
	return ignoreGone(err)
}

// podIP is the next address of 10.99.0.0/16, which is local to the cluster's
// network: a test can listen on a fake pod's address and play its part.
func (f *fakeNodes) podIP() string {
	n := f.nextIP.Add(1)
	return fmt.Sprintf("10.99.%d.%d", n/250%250, n%250+1)
}

func ignoreGone(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// runningStatus says that every container of the pod runs and is ready, and that plain init containers are done.
func runningStatus(pod *core.Pod, ip string) core.PodStatus {
	now := meta.Now()
	status := core.PodStatus{Phase: core.PodRunning, StartTime: &now, PodIP: ip, PodIPs: []core.PodIP{{IP: ip}}}
	for _, kind := range []core.PodConditionType{core.PodInitialized, core.ContainersReady, core.PodReady} {
		status.Conditions = append(status.Conditions,
			core.PodCondition{Type: kind, Status: core.ConditionTrue, LastTransitionTime: now})
	}
	running := core.ContainerState{Running: &core.ContainerStateRunning{StartedAt: now}}
	done := core.ContainerState{Terminated: &core.ContainerStateTerminated{
		Reason: "Completed", StartedAt: now, FinishedAt: now}}
	for _, c := range pod.Spec.InitContainers {
		state := done
		if ptr.Deref(c.RestartPolicy, "") == core.ContainerRestartPolicyAlways {
			state = running
		}
		status.InitContainerStatuses = append(status.InitContainerStatuses, readyContainer(c, state))
	}
	for _, c := range pod.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, readyContainer(c, running))
	}
	return status
}

func readyContainer(c core.Container, state core.ContainerState) core.ContainerStatus {
	return core.ContainerStatus{Name: c.Name, Image: c.Image, ImageID: c.Image, Ready: true, Started: ptr.To(true), State: state}
}
