// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// withVolume mounts a volume at /volume of the main container.
func withVolume(pod *corev1.Pod, source corev1.VolumeSource) *corev1.Pod {
	pod.Spec.Volumes = []corev1.Volume{{Name: "volume", VolumeSource: source}}
	pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "volume", MountPath: "/volume"}}
	return pod
}

func TestConfigMapVolumeFollows(t *testing.T) {
	client, ns := sandboxed(t)
	maps := client.CoreV1().ConfigMaps(ns)
	m, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "m"}, Data: map[string]string{"key": "old"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	source := corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "m"}}}
	create(t, client, ns, withVolume(serverOf("reader"), source))
	forwarded := expose(t, client, ns, "reader")
	read := func() (string, error) { return get("http://" + forwarded + "/file?path=/volume/key") }
	eventually(t, 20*time.Second, func() error { return says(read, "old") })
	m.Data["key"] = "new"
	if _, err := maps.Update(t.Context(), m, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, func() error { return says(read, "new") })
}

func TestImmutableConfigMap(t *testing.T) {
	client, ns := sandboxed(t)
	maps := client.CoreV1().ConfigMaps(ns)
	m, err := maps.Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "m"}, Immutable: ptr(true), Data: map[string]string{"key": "value", "other": "x"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod := withVolume(podOf("reader", "cat", "/volume/sub/file", "/single"), corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
		LocalObjectReference: corev1.LocalObjectReference{Name: "m"}, Items: []corev1.KeyToPath{{Key: "key", Path: "sub/file"}},
	}})
	pod.Spec.Containers[0].VolumeMounts = append(pod.Spec.Containers[0].VolumeMounts,
		corev1.VolumeMount{Name: "volume", MountPath: "/single", SubPath: "sub/file"})
	if log := runToEnd(t, client, ns, pod, corev1.PodSucceeded); log != "value\nvalue\n" {
		t.Errorf("read %q", log)
	}
	m.Data["key"] = "new"
	if _, err := maps.Update(t.Context(), m, metav1.UpdateOptions{}); err == nil {
		t.Error("the API server has changed an immutable configMap")
	}
}

func TestReadOnlyMountsAndRoot(t *testing.T) {
	client, ns := sandboxed(t)
	empty := corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}}
	readOnly := withVolume(podOf("mount", "write", "/volume/file", "x"), empty)
	readOnly.Spec.Containers[0].VolumeMounts[0].ReadOnly = true
	root := podOf("root", "write", "/tmp/file", "x")
	root.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{ReadOnlyRootFilesystem: ptr(true)}
	for _, pod := range []*corev1.Pod{readOnly, root} {
		if log := runToEnd(t, client, ns, pod, corev1.PodFailed); !strings.Contains(log, "read-only file system") {
			t.Errorf("%s: %q", pod.Name, log)
		}
	}
	writable := withVolume(podOf("writable", "write", "/volume/file", "x"), empty)
	runToEnd(t, client, ns, writable, corev1.PodSucceeded)
	runToEnd(t, client, ns, podOf("tmp", "write", "/tmp/file", "x"), corev1.PodSucceeded)
}

func TestHostPathWaitsForItsDirectory(t *testing.T) {
	client, ns := sandboxed(t)
	dir := filepath.Join(t.TempDir(), "later")
	pod := withVolume(podOf("reader", "cat", "/volume/file"), corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: dir, Type: ptr(corev1.HostPathDirectory)},
	})
	create(t, client, ns, pod)
	eventually(t, 20*time.Second, func() error {
		events, err := client.CoreV1().Events(ns).List(t.Context(), metav1.ListOptions{FieldSelector: "reason=FailedMount"})
		if err == nil && len(events.Items) == 0 {
			err = fmt.Errorf("no event FailedMount")
		}
		return err
	})
	waitPod(t, client, ns, "reader", func(p *corev1.Pod) error {
		for _, s := range p.Status.ContainerStatuses {
			if w := s.State.Waiting; p.Status.Phase == corev1.PodPending && w != nil && w.Reason == "ContainerCreating" {
				return nil
			}
		}
		return fmt.Errorf("not ContainerCreating: %s", p.Status.String())
	})
	fresh := dir + ".new"
	if err := os.Mkdir(fresh, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(fresh, "file"), []byte("content"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(fresh, dir); err != nil {
		t.Fatal(err)
	}
	waitPod(t, client, ns, "reader", inPhase(corev1.PodSucceeded))
	if log := logOf(t, ns, "reader", "main"); log != "content\n" {
		t.Errorf("read %q", log)
	}
}

func TestPersistentVolumeClaim(t *testing.T) {
	client, ns := sandboxed(t)
	dir := t.TempDir()
	size := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	_, err := client.CoreV1().PersistentVolumes().Create(t.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: ns},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: size, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: dir}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.CoreV1().PersistentVolumeClaims(ns).Create(t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "claim"},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, VolumeName: ns, StorageClassName: ptr(""),
			Resources: corev1.VolumeResourceRequirements{Requests: size},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod := withVolume(podOf("writer", "write", "/volume/file", "kept"), corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim"},
	})
	runToEnd(t, client, ns, pod, corev1.PodSucceeded)
	if data, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(data) != "kept" {
		t.Errorf("the volume contains %q (%v)", data, err)
	}
}

func TestProjectedToken(t *testing.T) {
	client, ns := sandboxed(t)
	const audience = "tests.local"
	pod := withVolume(podOf("token", "cat", "/volume/token", "/volume/labels"), corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Audience: audience, Path: "token", ExpirationSeconds: ptr(int64(600))}},
			{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{
				{Path: "labels", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels"}},
			}}},
		},
	}})
	lines := strings.Split(runToEnd(t, client, ns, pod, corev1.PodSucceeded), "\n")
	if lines[1] != `app="token"` {
		t.Errorf("labels %q", lines[1])
	}
	review := func(audience string) authv1.TokenReviewStatus {
		r, err := client.AuthenticationV1().TokenReviews().Create(t.Context(), &authv1.TokenReview{
			Spec: authv1.TokenReviewSpec{Token: lines[0], Audiences: []string{audience}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return r.Status
	}
	good := review(audience)
	if !good.Authenticated || !slices.Contains(good.Audiences, audience) || good.User.Username != "system:serviceaccount:"+ns+":default" {
		t.Errorf("review: %+v", good)
	}
	if got := good.User.Extra["authentication.kubernetes.io/pod-name"]; len(got) != 1 || got[0] != "token" {
		t.Errorf("the token is bound to pod %v, want token", got)
	}
	if review("other").Authenticated {
		t.Error("the token is accepted for another audience")
	}
}
