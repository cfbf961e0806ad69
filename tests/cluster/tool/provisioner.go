package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const provisionerName = "gristmill.test/local"

// provisioner makes a `local` volume for every claim of its storage classes.
// A local volume honours fsGroup; the controller manager's own host-path
// provisioner makes folders of root with mode 0750, which no other user can write.
type provisioner struct {
	client kubernetes.Interface
	node   string
	root   string
}

func provisionerMain() {
	kubeconfig := flag.String("kubeconfig", "", "path")
	node := flag.String("node", "", "the only node")
	root := flag.String("root", "", "folder of the volumes")
	flag.Parse()
	ctx, stop := untilSignalled()
	defer stop()
	client, err := newClient(*kubeconfig, 100)
	if err != nil {
		fail("provisioner", err)
	}
	p := &provisioner{client: client, node: *node, root: *root}
	for ctx.Err() == nil {
		if err := p.provision(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "provision:", err)
		}
		if err := p.reclaim(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "reclaim:", err)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// provision makes a volume for every claim that waits for one.
func (p *provisioner) provision(ctx context.Context) error {
	claims, err := p.client.CoreV1().PersistentVolumeClaims("").List(ctx, meta.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return err
	}
	for i := range claims.Items {
		claim := &claims.Items[i]
		waits := claim.Status.Phase == core.ClaimPending && claim.Spec.VolumeName == "" &&
			claim.Annotations["volume.kubernetes.io/storage-provisioner"] == provisionerName
		if !waits {
			continue
		}
		if err := p.createVolume(ctx, claim); err != nil {
			return err
		}
	}
	return nil
}

// reclaim removes the released volumes whose policy is Delete, folders included.
func (p *provisioner) reclaim(ctx context.Context) error {
	volumes, err := p.client.CoreV1().PersistentVolumes().List(ctx, meta.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return err
	}
	for i := range volumes.Items {
		volume := &volumes.Items[i]
		gone := volume.Annotations["pv.kubernetes.io/provisioned-by"] == provisionerName &&
			volume.Status.Phase == core.VolumeReleased &&
			volume.Spec.PersistentVolumeReclaimPolicy == core.PersistentVolumeReclaimDelete
		if !gone {
			continue
		}
		if err := os.RemoveAll(volume.Spec.Local.Path); err != nil {
			return err
		}
		err := p.client.CoreV1().PersistentVolumes().Delete(ctx, volume.Name, meta.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

func (p *provisioner) createVolume(ctx context.Context, claim *core.PersistentVolumeClaim) error {
	class, err := p.client.StorageV1().StorageClasses().Get(ctx, *claim.Spec.StorageClassName, meta.GetOptions{})
	if err != nil {
		return err
	}
	name := "pvc-" + string(claim.UID)
	path := filepath.Join(p.root, name)
	if err := os.MkdirAll(path, 0o770); err != nil {
		return err
	}
	volume := &core.PersistentVolume{
		ObjectMeta: meta.ObjectMeta{Name: name,
			Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": provisionerName}},
		Spec: core.PersistentVolumeSpec{
			Capacity:                      core.ResourceList{core.ResourceStorage: claim.Spec.Resources.Requests[core.ResourceStorage]},
			AccessModes:                   claim.Spec.AccessModes,
			StorageClassName:              class.Name,
			PersistentVolumeReclaimPolicy: *class.ReclaimPolicy,
			PersistentVolumeSource:        core.PersistentVolumeSource{Local: &core.LocalVolumeSource{Path: path}},
			ClaimRef: &core.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: claim.Namespace,
				Name: claim.Name, UID: claim.UID, ResourceVersion: claim.ResourceVersion},
			NodeAffinity: onNode(p.node),
		},
	}
	_, err = p.client.CoreV1().PersistentVolumes().Create(ctx, volume, meta.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

func onNode(name string) *core.VolumeNodeAffinity {
	return &core.VolumeNodeAffinity{Required: &core.NodeSelector{NodeSelectorTerms: []core.NodeSelectorTerm{{
		MatchExpressions: []core.NodeSelectorRequirement{{
			Key: "kubernetes.io/hostname", Operator: core.NodeSelectorOpIn, Values: []string{name}}}}}}}
}
