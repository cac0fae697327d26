// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// TestAutoscalerSample checks that the metric of the sample autoscaler exists: SGLang has it only with --enable-metrics,
// and Prometheus gets it only through a monitor of the engine's port.
func TestAutoscalerSample(t *testing.T) {
	read := func(name string, into any) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join("..", "..", "config", "samples", "argocd", "model", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.UnmarshalStrict(text, into); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	var scaler autoscalingv2.HorizontalPodAutoscaler
	var moed semmoev1.MoEDeployment
	var monitor struct {
		metav1.TypeMeta   `json:",inline"`
		metav1.ObjectMeta `json:"metadata"`
		Spec              struct {
			Selector            metav1.LabelSelector          `json:"selector"`
			PodMetricsEndpoints []struct{ Port, Path string } `json:"podMetricsEndpoints"`
		} `json:"spec"`
	}
	read("autoscaler.yaml", &scaler)
	read("moedeployment.yaml", &moed)
	read("podmonitor.yaml", &monitor)
	if metric := scaler.Spec.Metrics[0].Pods.Metric.Name; metric != "sglang_num_queue_reqs" || cmp.Or(moed.Spec.Engine.Type, semmoev1.EngineSGLang) != semmoev1.EngineSGLang {
		t.Errorf("the metric is %s of engine %s", metric, moed.Spec.Engine.Type)
	}
	if !slices.Contains(moed.Spec.Engine.Args, "--enable-metrics") {
		t.Errorf("the engine has no metrics: %v", moed.Spec.Engine.Args)
	}
	want := map[string]string{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: semmoev1.ComponentEngine}
	endpoints := monitor.Spec.PodMetricsEndpoints
	if !maps.Equal(monitor.Spec.Selector.MatchLabels, want) || len(endpoints) != 1 || endpoints[0].Port != "http" || endpoints[0].Path != "/metrics" {
		t.Errorf("the monitor selects %v, endpoints %v", monitor.Spec.Selector, endpoints)
	}
	if target := scaler.Spec.ScaleTargetRef; target.Kind != "MoEDeployment" || target.Name != moed.Name || scaler.Namespace != moed.Namespace || monitor.Namespace != moed.Namespace {
		t.Errorf("the autoscaler scales %v", target)
	}
}

// TestSamples checks that the API server accepts every sample unchanged, without an unknown field. Of samples for
// KServe and Dynamo, whose CRDs are not installed, only the pods are checked.
func TestSamples(t *testing.T) {
	accepted, pods := 0, 0
	err := filepath.WalkDir(filepath.Join("..", "..", "config", "samples"), func(file string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		for documents := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
			sample := &unstructured.Unstructured{}
			if err := documents.Decode(&sample.Object); errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			if !slices.Contains(foreignGroups, sample.GroupVersionKind().Group) {
				accepted++
				accept(t, file, sample)
			}
			for _, pod := range podsOf(t, file, sample) {
				pods++
				pod.Namespace, pod.Name = "default", "sample"
				if err := api.Create(t.Context(), pod, client.DryRunAll); err != nil {
					t.Errorf("%s: a pod of %s %s: %v", file, sample.GetKind(), sample.GetName(), err)
				}
			}
		}
	})
	if err != nil || accepted < 19 || pods < 7 {
		t.Errorf("accepted only %d samples and %d pods (error %v)", accepted, pods, err)
	}
}

// foreignGroups contains the API groups whose CRDs are not installed.
var foreignGroups = []string{"serving.kserve.io", "nvidia.com", "monitoring.coreos.com", "kueue.x-k8s.io"}

// accept validates a sample with a dry-run creation.
func accept(t *testing.T, file string, sample *unstructured.Unstructured) {
	t.Helper()
	if namespaced, err := api.IsObjectNamespaced(sample); err != nil {
		t.Errorf("%s: %v", file, err)
	} else if namespaced {
		sample.SetNamespace("default")
	}
	if err := api.Create(t.Context(), sample.DeepCopy(), client.DryRunAll); err != nil {
		t.Errorf("%s: %s %s: %v", file, sample.GetKind(), sample.GetName(), err)
	}
}

// podsOf returns the pods in a sample: each nested object with containers, or with the main container of Dynamo.
func podsOf(t *testing.T, file string, sample *unstructured.Unstructured) []*corev1.Pod {
	t.Helper()
	var pods []*corev1.Pod
	var look func(value any)
	look = func(value any) {
		fields, ok := value.(map[string]any)
		if !ok {
			return
		}
		spec := runtime.DeepCopyJSON(fields)
		if main, found := spec["mainContainer"].(map[string]any); found {
			main["name"] = "main"
			spec["containers"] = []any{main}
		}
		if spec["containers"] == nil {
			for _, field := range slices.Sorted(maps.Keys(fields)) {
				look(fields[field])
			}
			return
		}
		// Dynamo and KServe have these fields next to the fields of a pod.
		for _, field := range []string{"mainContainer", "minReplicas", "maxReplicas", "annotations"} {
			delete(spec, field)
		}
		pod := &corev1.Pod{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(spec, &pod.Spec, true); err != nil {
			t.Errorf("%s: a pod of %s %s: %v", file, sample.GetKind(), sample.GetName(), err)
		}
		pods = append(pods, pod)
	}
	if sample.GroupVersionKind().Group != "semmoe.io" {
		look(sample.Object["spec"])
	}
	return pods
}
