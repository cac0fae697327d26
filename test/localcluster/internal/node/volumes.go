// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/semmoe/operator/test/localcluster/internal/sandbox"
)

type volume struct {
	// path is the location of the content outside the containers.
	path     string
	readOnly bool
	// mounted is true if the agent has mounted a file system at path.
	mounted bool
	// payload is the written content of a volume from the API; nil for other volumes.
	payload *payload
}

// setUpVolume prepares a volume of the pod below dir.
func setUpVolume(ctx context.Context, client kubernetes.Interface, p podContext, v *corev1.Volume, dir string) (*volume, error) {
	path := filepath.Join(dir, v.Name)
	switch s := v.VolumeSource; {
	case s.HostPath != nil:
		return &volume{path: s.HostPath.Path}, checkHostPath(s.HostPath)
	case s.PersistentVolumeClaim != nil:
		return claimedVolume(ctx, client, p.pod.Namespace, s.PersistentVolumeClaim)
	case s.EmptyDir != nil:
		return emptyDir(path, s.EmptyDir)
	case s.ConfigMap != nil, s.Secret != nil, s.DownwardAPI != nil, s.Projected != nil:
		if err := os.MkdirAll(path, 0o755); err != nil {
			return nil, err
		}
		result := &volume{path: path, readOnly: true, payload: &payload{}}
		return result, result.refresh(ctx, client, p, v)
	}
	return nil, fmt.Errorf("the kind of volume %s is not supported by the local node", v.Name)
}

// refresh updates the content of a volume from the API. It does nothing for other volumes.
func (v *volume) refresh(ctx context.Context, client kubernetes.Interface, p podContext, source *corev1.Volume) error {
	if v.payload == nil {
		return nil
	}
	next, err := buildPayload(ctx, client, p, source)
	if err != nil {
		return err
	}
	if v.payload.files == nil || !sameFiles(v.payload.files, next.files) {
		if err := writePayload(v.path, next.files); err != nil {
			return err
		}
	}
	v.payload = &next
	return nil
}

// refreshAt returns the time of the next refresh; zero means never.
func (v *volume) refreshAt() time.Time {
	if v.payload == nil {
		return time.Time{}
	}
	return v.payload.refreshAt
}

// tearDown unmounts the file systems that the agent has mounted.
func (v *volume) tearDown() error {
	if !v.mounted {
		return nil
	}
	return unix.Unmount(v.path, unix.MNT_DETACH)
}

func emptyDir(path string, s *corev1.EmptyDirVolumeSource) (*volume, error) {
	if err := os.MkdirAll(path, 0o777); err != nil {
		return nil, err
	}
	if s.Medium == corev1.StorageMediumMemory {
		options := "mode=0777"
		if s.SizeLimit != nil && s.SizeLimit.Value() > 0 {
			options += fmt.Sprintf(",size=%d", s.SizeLimit.Value())
		}
		if err := unix.Mount("tmpfs", path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
			return nil, err
		}
		return &volume{path: path, mounted: true}, nil
	}
	if s.Medium != corev1.StorageMediumDefault {
		return nil, fmt.Errorf("emptyDir medium %s is not supported by the local node: only Memory is", s.Medium)
	}
	return &volume{path: path}, os.Chmod(path, 0o777)
}

// checkHostPath verifies the type of a hostPath volume, and creates the file or directory if the type requires it, like
// a kubelet.
func checkHostPath(s *corev1.HostPathVolumeSource) error {
	kind := corev1.HostPathUnset
	if s.Type != nil {
		kind = *s.Type
	}
	switch kind {
	case corev1.HostPathUnset:
		if _, err := os.Stat(s.Path); err == nil {
			return nil
		}
		return os.MkdirAll(s.Path, 0o755)
	case corev1.HostPathDirectoryOrCreate:
		return os.MkdirAll(s.Path, 0o755)
	case corev1.HostPathFileOrCreate:
		f, err := os.OpenFile(s.Path, os.O_CREATE, 0o644)
		if err != nil {
			return err
		}
		return f.Close()
	}
	info, err := os.Stat(s.Path)
	if err != nil {
		return fmt.Errorf("hostPath type check failed: %w", err)
	}
	mode := info.Mode()
	ok := map[corev1.HostPathType]bool{
		corev1.HostPathDirectory: mode.IsDir(),
		corev1.HostPathFile:      mode.IsRegular(),
		corev1.HostPathSocket:    mode&os.ModeSocket != 0,
		corev1.HostPathCharDev:   mode&os.ModeCharDevice != 0,
		corev1.HostPathBlockDev:  mode&os.ModeDevice != 0 && mode&os.ModeCharDevice == 0,
	}[kind]
	if !ok {
		return fmt.Errorf("hostPath type check failed: %s is not a %s", s.Path, kind)
	}
	return nil
}

// claimedVolume returns the directory of the volume that is bound to a claim.
func claimedVolume(ctx context.Context, client kubernetes.Interface, namespace string, s *corev1.PersistentVolumeClaimVolumeSource) (*volume, error) {
	claim, err := client.CoreV1().PersistentVolumeClaims(namespace).Get(ctx, s.ClaimName, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	if claim.Status.Phase != corev1.ClaimBound {
		return nil, fmt.Errorf("claim %s is %s, not Bound", s.ClaimName, claim.Status.Phase)
	}
	bound, err := client.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	switch {
	case bound.Spec.HostPath != nil:
		return &volume{path: bound.Spec.HostPath.Path, readOnly: s.ReadOnly}, checkHostPath(bound.Spec.HostPath)
	case bound.Spec.Local != nil:
		_, err := os.Stat(bound.Spec.Local.Path)
		return &volume{path: bound.Spec.Local.Path, readOnly: s.ReadOnly}, err
	}
	return nil, fmt.Errorf("volume %s is neither hostPath nor local: others are not supported by the local node", bound.Name)
}

// mounts returns the mounts of the pod's volumes in the container.
func mounts(c *corev1.Container, volumes map[string]*volume, env map[string]string) ([]sandbox.Mount, error) {
	var result []sandbox.Mount
	for _, m := range c.VolumeMounts {
		v := volumes[m.Name]
		if v == nil {
			return nil, fmt.Errorf("volume %s does not exist", m.Name)
		}
		source := v.path
		if subPath := m.SubPath + expand(m.SubPathExpr, env); subPath != "" {
			var err error
			if source, err = resolveSubPath(v, subPath); err != nil {
				return nil, fmt.Errorf("volumeMount %s: %w", m.MountPath, err)
			}
		}
		result = append(result, sandbox.Mount{Source: source, Target: m.MountPath, ReadOnly: m.ReadOnly || v.readOnly})
	}
	return result, nil
}

// resolveSubPath returns the location of a path inside a volume, and creates a directory if the path does not exist.
// Links are followed, but never out of the volume.
func resolveSubPath(v *volume, subPath string) (string, error) {
	if !filepath.IsLocal(subPath) {
		return "", fmt.Errorf("subPath %s leaves its volume", subPath)
	}
	full := filepath.Join(v.path, subPath)
	if _, err := os.Lstat(full); errors.Is(err, os.ErrNotExist) && !v.readOnly {
		if err := os.MkdirAll(full, 0o755); err != nil {
			return "", err
		}
	}
	real, err := filepath.EvalSymlinks(full)
	if err != nil {
		return "", err
	}
	base, err := filepath.EvalSymlinks(v.path)
	if err != nil {
		return "", err
	}
	if real != base && !strings.HasPrefix(real, base+string(filepath.Separator)) {
		return "", fmt.Errorf("subPath %s leads out of its volume", subPath)
	}
	return real, nil
}
