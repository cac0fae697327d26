// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/semmoe/operator/test/tier"
)

// TestBackupAndRestore deletes a namespace with all its objects and its artifacts in the store, and restores both from
// a backup. The model is served under the same plan and gives the same answers, and no profile is recorded again.
// Backups contain no status, UID or owner reference. They contain either only the objects that users wrote, or all
// objects except Jobs and pods, as generic backup tools store them.
func TestBackupAndRestore(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	for name, all := range map[string]bool{"user-provided objects": false, "every object": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			namespace := newNamespace(t)
			stop := startManager(t, namespace, nil)
			create(t, dataset(t, namespace, 4))
			moed := profiledDeployment(namespace)
			create(t, moed)
			planned := waitPlanned(t, moed)
			answers := completions(t, serviceURL(t, moed))
			state := endState(t, namespace)

			objects := backUp(t, namespace, all)
			artifacts := t.TempDir()
			stop()
			loseNamespace(t, namespace)
			moveArtifacts(t, storeDir(), artifacts, namespace)

			moveArtifacts(t, artifacts, storeDir(), namespace)
			create(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
			journal := recordJournal(t, namespace)
			for _, object := range objects {
				if err := api.Create(t.Context(), object); client.IgnoreAlreadyExists(err) != nil {
					t.Fatalf("%s %s: %v", object.GetKind(), object.GetName(), err)
				}
			}
			startManager(t, namespace, nil)
			restored := waitPlanned(t, moed)
			if restored.Status.PlanDigest != planned.Status.PlanDigest {
				t.Errorf("the serving plan is %s, was %s", restored.Status.PlanDigest, planned.Status.PlanDigest)
			}
			if jobs := profilingJobsMade(journal); jobs != 0 {
				t.Errorf("%d profiling Jobs after the restore, want none", jobs)
			}
			for prompt, answer := range completions(t, serviceURL(t, moed)) {
				if answer != answers[prompt] {
					t.Errorf("prompt %q is answered with %q, was %q", prompt, answer, answers[prompt])
				}
			}
			dropProfilingJobs(state)
			eventually(t, settleTimeout, "the previous state is restored", func() error { return same("state", state, endState(t, namespace)) })
			t.Logf("%d objects restored", len(objects))
			clearNamespace(t, namespace)
		})
	}
}

// backUp reads the objects of a namespace in the form of a backup: only the objects that users wrote, or all objects
// that are not recreated automatically.
func backUp(t *testing.T, namespace string, all bool) []*unstructured.Unstructured {
	t.Helper()
	var saved []*unstructured.Unstructured
	for _, list := range kinds() {
		if err := api.List(t.Context(), list, client.InNamespace(namespace)); err != nil {
			t.Fatal(err)
		}
		for _, object := range objects(list) {
			kind := kindOf(object)
			made := object.GetLabels()["app.kubernetes.io/managed-by"] == "semmoe-operator"
			switch {
			case kind == "Job" || kind == "Pod" || made && !all, kind == "ServiceAccount" && object.GetName() == "default", object.GetName() == "kube-root-ca.crt":
				continue
			}
			content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
			if err != nil {
				t.Fatal(err)
			}
			u := &unstructured.Unstructured{Object: content}
			gvk, err := apiutil.GVKForObject(object, api.Scheme())
			if err != nil {
				t.Fatal(err)
			}
			u.SetGroupVersionKind(gvk)
			u.Object["metadata"] = map[string]any{"namespace": namespace, "name": object.GetName()}
			u.SetLabels(object.GetLabels())
			u.SetAnnotations(object.GetAnnotations())
			delete(u.Object, "status")
			if address, _, _ := unstructured.NestedString(u.Object, "spec", "clusterIP"); kind == "Service" && address != corev1.ClusterIPNone { // assigned by the cluster
				unstructured.RemoveNestedField(u.Object, "spec", "clusterIP")
				unstructured.RemoveNestedField(u.Object, "spec", "clusterIPs")
			}
			saved = append(saved, u)
		}
	}
	if len(saved) < 2 {
		t.Fatalf("the backup contains %d objects", len(saved))
	}
	return saved
}

// moveArtifacts moves the artifact files of a namespace from one directory to another.
func moveArtifacts(t *testing.T, from, to, namespace string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(from, namespace+".*"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%s has no artifacts of %s: %v", from, namespace, err)
	}
	for _, file := range files {
		if err := os.Rename(file, filepath.Join(to, filepath.Base(file))); err != nil {
			t.Fatal(err)
		}
	}
}

// loseNamespace deletes a namespace with all its objects, the pods first. While any pod is left, the namespace
// controller retries only after half of the pod's termination grace period.
func loseNamespace(t *testing.T, namespace string) {
	t.Helper()
	clearNamespace(t, namespace)
	eventually(t, waitTimeout, "the pods are deleted", func() error {
		var pods corev1.PodList
		if err := api.List(t.Context(), &pods, client.InNamespace(namespace)); err != nil {
			return err
		}
		if len(pods.Items) > 0 {
			return fmt.Errorf("%d pods are left", len(pods.Items))
		}
		return nil
	})
	lost := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if err := api.Delete(t.Context(), lost); err != nil {
		t.Fatal(err)
	}
	eventually(t, waitTimeout, "the namespace is deleted", func() error {
		err := api.Get(t.Context(), client.ObjectKeyFromObject(lost), lost)
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(err, fmt.Errorf("namespace conditions: %+v", lost.Status.Conditions))
	})
}

// completions returns the model's greedy answers to a few prompts, by prompt.
func completions(t *testing.T, url string) map[string]string {
	t.Helper()
	answers := map[string]string{}
	for _, prompt := range []string{"func main() {", "SELECT name FROM", "The quick brown fox"} {
		body := fmt.Sprintf(`{"model": "tiny", "prompt": %q, "max_tokens": 16, "temperature": 0}`, prompt)
		eventually(t, waitTimeout, "the model answers", func() error {
			response, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(body))
			if err != nil {
				return err
			}
			defer response.Body.Close()
			var completion struct {
				Choices []struct {
					Text string `json:"text"`
				} `json:"choices"`
			}
			text, err := io.ReadAll(response.Body)
			if err != nil || response.StatusCode != http.StatusOK {
				return fmt.Errorf("%s: %s, %w", response.Status, text, err)
			}
			if err := json.Unmarshal(text, &completion); err != nil {
				return err
			}
			if len(completion.Choices) != 1 || completion.Choices[0].Text == "" {
				return fmt.Errorf("the completion has no text: %s", text)
			}
			answers[prompt] = completion.Choices[0].Text
			return nil
		})
	}
	return answers
}
