// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// volumeName is the name of the PersistentVolume for the artifact store's claim.
const volumeName = "semmoe-demo-store"

// offerVolume creates a directory on this machine and a PersistentVolume of it for the artifact store. It does nothing
// in a cluster with a default StorageClass. Local clusters, and small clusters on this machine, have none.
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
	// The store runs as another user, and a hostPath volume keeps the owner of the directory.
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

// removeVolume deletes the volume and the directory of offerVolume. The claim must be deleted before.
func (d *demo) removeVolume(ctx context.Context) error {
	if d.volume == "" {
		return nil
	}
	if _, err := d.cluster.run(ctx, nil, "delete", "persistentvolume", volumeName, "--ignore-not-found"); err != nil {
		return err
	}
	if err := os.RemoveAll(d.volume); err != nil {
		return fmt.Errorf("failed to remove the directory of the artifact store: %w", err)
	}
	return nil
}
