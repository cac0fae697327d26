// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// file is one file of a volume with content from the API.
type file struct {
	data []byte
	mode os.FileMode
}

// payload is the content of a volume, by relative path. refreshAt is the latest time of the next refresh; zero means
// that the content is refreshed only when a source changes.
type payload struct {
	files     map[string]file
	refreshAt time.Time
}

const defaultFileMode = 0o644

// buildPayload reads the content of a ConfigMap, Secret, downwardAPI or projected volume.
func buildPayload(ctx context.Context, client kubernetes.Interface, p podContext, v *corev1.Volume) (payload, error) {
	result := payload{files: map[string]file{}}
	switch s := v.VolumeSource; {
	case s.ConfigMap != nil:
		data, err := configMapData(ctx, client, p.pod.Namespace, s.ConfigMap.Name, isTrue(s.ConfigMap.Optional))
		if err != nil {
			return payload{}, err
		}
		return result, result.addKeys("configmap "+s.ConfigMap.Name, data, s.ConfigMap.Items, isTrue(s.ConfigMap.Optional), fileMode(s.ConfigMap.DefaultMode))
	case s.Secret != nil:
		data, err := secretData(ctx, client, p.pod.Namespace, s.Secret.SecretName, isTrue(s.Secret.Optional))
		if err != nil {
			return payload{}, err
		}
		return result, result.addKeys("secret "+s.Secret.SecretName, data, s.Secret.Items, isTrue(s.Secret.Optional), fileMode(s.Secret.DefaultMode))
	case s.DownwardAPI != nil:
		return result, result.addFields(p, s.DownwardAPI.Items, fileMode(s.DownwardAPI.DefaultMode))
	default:
		mode := fileMode(s.Projected.DefaultMode)
		for i := range s.Projected.Sources {
			if err := result.addSource(ctx, client, p, &s.Projected.Sources[i], mode); err != nil {
				return payload{}, err
			}
		}
		return result, nil
	}
}

// addSource adds one source of a projected volume.
func (l *payload) addSource(ctx context.Context, client kubernetes.Interface, p podContext, s *corev1.VolumeProjection, mode os.FileMode) error {
	switch {
	case s.ConfigMap != nil:
		data, err := configMapData(ctx, client, p.pod.Namespace, s.ConfigMap.Name, isTrue(s.ConfigMap.Optional))
		if err != nil {
			return err
		}
		return l.addKeys("configmap "+s.ConfigMap.Name, data, s.ConfigMap.Items, isTrue(s.ConfigMap.Optional), mode)
	case s.Secret != nil:
		data, err := secretData(ctx, client, p.pod.Namespace, s.Secret.Name, isTrue(s.Secret.Optional))
		if err != nil {
			return err
		}
		return l.addKeys("secret "+s.Secret.Name, data, s.Secret.Items, isTrue(s.Secret.Optional), mode)
	case s.DownwardAPI != nil:
		return l.addFields(p, s.DownwardAPI.Items, mode)
	case s.ServiceAccountToken != nil:
		return l.addToken(ctx, client, p.pod, s.ServiceAccountToken, mode)
	}
	return errors.New("a source of this projected volume is not supported by the local node")
}

// addKeys adds the listed keys, or all keys if the list is empty.
func (l *payload) addKeys(source string, data map[string][]byte, items []corev1.KeyToPath, optional bool, mode os.FileMode) error {
	if len(items) == 0 {
		for key, value := range data {
			l.files[key] = file{value, mode}
		}
		return nil
	}
	for _, item := range items {
		value, ok := data[item.Key]
		switch {
		case ok:
			l.files[filepath.Clean(item.Path)] = file{value, modeOr(item.Mode, mode)}
		case !optional:
			return fmt.Errorf("%s has no key %s", source, item.Key)
		}
	}
	return nil
}

func (l *payload) addFields(p podContext, items []corev1.DownwardAPIVolumeFile, mode os.FileMode) error {
	for _, item := range items {
		var value string
		var err error
		if item.FieldRef != nil {
			value, err = fieldValue(p, item.FieldRef.FieldPath)
		} else {
			value, err = resourceValue(p, nil, item.ResourceFieldRef)
		}
		if err != nil {
			return err
		}
		l.files[filepath.Clean(item.Path)] = file{[]byte(value), modeOr(item.Mode, mode)}
	}
	return nil
}

// addToken adds a token that is bound to the pod. The token is renewed after 80% of its lifetime.
func (l *payload) addToken(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod, s *corev1.ServiceAccountTokenProjection, mode os.FileMode) error {
	request := &authv1.TokenRequest{Spec: authv1.TokenRequestSpec{
		ExpirationSeconds: s.ExpirationSeconds,
		BoundObjectRef:    &authv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
	}}
	if s.Audience != "" {
		request.Spec.Audiences = []string{s.Audience}
	}
	token, err := client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, pod.Spec.ServiceAccountName, request, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("token of service account %s: %w", pod.Spec.ServiceAccountName, err)
	}
	l.files[filepath.Clean(s.Path)] = file{[]byte(token.Status.Token), mode}
	life := time.Until(token.Status.ExpirationTimestamp.Time)
	if at := time.Now().Add(life * 4 / 5); l.refreshAt.IsZero() || at.Before(l.refreshAt) {
		l.refreshAt = at
	}
	return nil
}

func fileMode(mode *int32) os.FileMode { return modeOr(mode, defaultFileMode) }

func modeOr(mode *int32, other os.FileMode) os.FileMode {
	if mode == nil {
		return other
	}
	return os.FileMode(*mode)
}

// references reports whether the volume's content depends on the named ConfigMap or Secret.
func references(v *corev1.Volume, kind, name string) bool {
	switch kind {
	case "ConfigMap":
		if v.ConfigMap != nil {
			return v.ConfigMap.Name == name
		}
		return v.Projected != nil && slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool {
			return s.ConfigMap != nil && s.ConfigMap.Name == name
		})
	default:
		if v.Secret != nil {
			return v.Secret.SecretName == name
		}
		return v.Projected != nil && slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool {
			return s.Secret != nil && s.Secret.Name == name
		})
	}
}

// usesFields reports whether the volume's content depends on the pod's metadata.
func usesFields(v *corev1.Volume) bool {
	return v.DownwardAPI != nil || v.Projected != nil && slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool {
		return s.DownwardAPI != nil
	})
}

func sameFiles(a, b map[string]file) bool {
	return maps.EqualFunc(a, b, func(x, y file) bool { return x.mode == y.mode && bytes.Equal(x.data, y.data) })
}

// writePayload replaces the content of dir atomically: it writes the files to a new directory, and moves the link
// ..data to this directory. All visible names are links through ..data, so a reader sees either all old or all new
// files.
func writePayload(dir string, files map[string]file) error {
	fresh, err := os.MkdirTemp(dir, "..")
	if err != nil {
		return err
	}
	if err := os.Chmod(fresh, 0o755); err != nil {
		return err
	}
	for path, f := range files {
		full := filepath.Join(fresh, path)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(full, f.data, 0o600); err != nil {
			return err
		}
		if err := os.Chmod(full, f.mode); err != nil {
			return err
		}
	}
	const data = "..data"
	old, _ := os.Readlink(filepath.Join(dir, data))
	next := filepath.Join(dir, data+"_tmp")
	if err := os.Symlink(filepath.Base(fresh), next); err != nil {
		return err
	}
	if err := os.Rename(next, filepath.Join(dir, data)); err != nil {
		return err
	}
	if err := linkNames(dir, data, files); err != nil {
		return err
	}
	if old == "" {
		return nil
	}
	return os.RemoveAll(filepath.Join(dir, old))
}

// linkNames creates the links for the files in dir and removes links of files that no longer exist.
func linkNames(dir, data string, files map[string]file) error {
	names := map[string]bool{}
	for path := range files {
		first, _, _ := strings.Cut(path, string(filepath.Separator))
		names[first] = true
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch {
		case strings.HasPrefix(e.Name(), ".."):
		case names[e.Name()]:
			delete(names, e.Name())
		default:
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	for name := range names {
		if err := os.Symlink(filepath.Join(data, name), filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}
