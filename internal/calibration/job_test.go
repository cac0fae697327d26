// SPDX-License-Identifier: Apache-2.0

package calibration

import (
	"bytes"
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func example() Spec {
	return Spec{
		Namespace: "team", Name: "h200", Image: "engine:1", Python: "python3", GPUs: 4, ResourceName: "nvidia.com/gpu", Timeout: time.Hour,
		Shapes: []string{"4096:14336:2:2"}, HostTiming: true, Quick: true,
		NodeSelector: map[string]string{"gpu": "h200"}, PullSecrets: []string{"pull"},
	}
}

// TestManifest compares the Job with a golden file. Users keep the manifest in their repositories.
func TestManifest(t *testing.T) {
	manifest, err := Manifest(example())
	if err != nil {
		t.Fatal(err)
	}
	script, job, found := bytes.Cut(manifest, []byte("---\n"))
	if !found {
		t.Fatalf("one document: %s", manifest)
	}
	var holder corev1.ConfigMap
	if err := yaml.UnmarshalStrict(script, &holder); err != nil {
		t.Fatal(err)
	}
	if holder.Namespace != "team" || holder.Name != "h200" || holder.Data["calibrate.py"] != Script || len(holder.Data) != 1 {
		t.Errorf("ConfigMap %s/%s with %d files", holder.Namespace, holder.Name, len(holder.Data))
	}
	const golden = "testdata/job.yaml"
	if *update {
		if err := os.WriteFile(golden, job, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(job)); diff != "" {
		t.Errorf("go test ./internal/calibration -run TestManifest -args -update rewrites the file:\n%s", diff)
	}
}

func TestValidate(t *testing.T) {
	if err := example().Validate(); err != nil {
		t.Fatalf("a valid spec: %v", err)
	}
	for want, change := range map[string]func(*Spec){
		"--image is missing":                     func(s *Spec) { s.Image = "" },
		"--python is empty":                      func(s *Spec) { s.Python = "" },
		"--gpus: 0 is invalid: must be 1 to 16":  func(s *Spec) { s.GPUs = 0 },
		"--gpus: 17 is invalid: must be 1 to 16": func(s *Spec) { s.GPUs = 17 },
		"--timeout: 59s":                         func(s *Spec) { s.Timeout = 59 * time.Second },
		`--name: "A"`:                            func(s *Spec) { s.Name = "A" },
		`--namespace: ""`:                        func(s *Spec) { s.Namespace = "" },
		`--resource-name: "gpu"`:                 func(s *Spec) { s.ResourceName = "gpu" },
		`--resource-name: "a/b/c"`:               func(s *Spec) { s.ResourceName = "a/b/c" },
		`--shape: "1:2:3"`:                       func(s *Spec) { s.Shapes = []string{"4096:14336:2:2", "1:2:3"} },
		`--shape: "8:8:0:1"`:                     func(s *Spec) { s.Shapes = []string{"8:8:0:1"} },
		"--node-selector: a=b c":                 func(s *Spec) { s.NodeSelector = map[string]string{"a": "b c"} },
		"--image is missing: set it to the image of the engine\n-": func(s *Spec) { s.Image, s.GPUs = "", -1 },
	} {
		spec := example()
		change(&spec)
		if err := spec.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestPodIsRestricted verifies that the pod conforms to the restricted Pod Security Standard and has no token, so that
// it can run wherever an engine can.
func TestPodIsRestricted(t *testing.T) {
	pod := example().Job().Spec.Template.Spec
	container := pod.Containers[0]
	switch {
	case len(pod.Containers) != 1 || len(pod.InitContainers) != 0:
		t.Errorf("%d containers, %d init containers", len(pod.Containers), len(pod.InitContainers))
	case *pod.AutomountServiceAccountToken, !*pod.SecurityContext.RunAsNonRoot, pod.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault:
		t.Errorf("pod %+v", pod)
	case *container.SecurityContext.AllowPrivilegeEscalation, !*container.SecurityContext.ReadOnlyRootFilesystem, container.SecurityContext.Capabilities.Drop[0] != "ALL":
		t.Errorf("container %+v", container.SecurityContext)
	}
	for _, volume := range pod.Volumes {
		if volume.ConfigMap == nil && volume.EmptyDir == nil {
			t.Errorf("volume %+v", volume)
		}
	}
}
