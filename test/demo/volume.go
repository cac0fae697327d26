package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// volumeName is the PersistentVolume that the artifact store's claim finds.
const volumeName = "semmoe-demo-store"

// offerVolume makes a directory of this machine the artifact store's volume, where the cluster has no default
// StorageClass that would make one: the local cluster, and small ones on this very machine.
func (d *demo) offerVolume(ctx context.Context) error {
	const defaults = `jsonpath={.items[*].metadata.annotations.storageclass\.kubernetes\.io/is-default-class}`
	classes, err := d.cluster.run(ctx, nil, "get", "storageclasses", "-o", defaults)
	if err != nil || strings.Contains(classes, "true") {
		return err
	}
	parent := filepath.Join(d.repository, "bin")
	if d.cluster.local != nil {
		parent = filepath.Dir(d.cluster.kubeconfig) // removed with the cluster
	}
	if d.volume, err = os.MkdirTemp(parent, "demo-store-"); err != nil {
		return err
	}
	// The store runs as a user of its own, and a hostPath volume keeps its owner.
	if err := os.Chmod(d.volume, 0o777); err != nil {
		return err
	}
	volume, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "PersistentVolume", "metadata": map[string]any{"name": volumeName},
		"spec": map[string]any{
			"capacity": map[string]any{"storage": "20Gi"}, "accessModes": []string{"ReadWriteOnce"},
			"persistentVolumeReclaimPolicy": "Retain",
			"hostPath":                      map[string]any{"path": d.volume, "type": "Directory"},
			"claimRef":                      map[string]any{"namespace": "semmoe-system", "name": "semmoe-store"},
		},
	})
	if err != nil {
		return err
	}
	_, err = d.cluster.run(ctx, volume, "apply", "-f", "-")
	return err
}

// removeVolume takes away what offerVolume made, after its claim.
func (d *demo) removeVolume(ctx context.Context) error {
	if d.volume == "" {
		return nil
	}
	if _, err := d.cluster.run(ctx, nil, "delete", "persistentvolume", volumeName, "--ignore-not-found"); err != nil {
		return err
	}
	if err := os.RemoveAll(d.volume); err != nil {
		return fmt.Errorf("remove the artifact store's volume: %w", err)
	}
	return nil
}
