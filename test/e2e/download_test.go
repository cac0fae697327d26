// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/model/hub/report"
	"github.com/semmoe/operator/test/hub/incluster"
)

// startHub runs a hub with the gated repository org/tiny in a pod, and returns its address.
func startHub(t *testing.T, namespace, token string) string {
	t.Helper()
	pod, service := incluster.Objects(namespace, "org/tiny", checkpointDir(), "--gated", "--token="+token, "--stall-once")
	create(t, pod)
	create(t, service)
	eventually(t, waitTimeout, "the hub is ready", func() error {
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(pod), pod); err != nil {
			return err
		}
		if !podhealth.Ready(pod) {
			return fmt.Errorf("pod hub is %s", pod.Status.Phase)
		}
		return nil
	})
	return incluster.Endpoint(namespace)
}

// TestDownload serves and plans a model that is downloaded from a hub. The repository is gated: the condition names the
// missing token. A download whose pod is deleted resumes. A second deployment finds the model and downloads nothing. There
// is no data set: the model writes the text of its profile.
func TestDownload(t *testing.T) {
	t.Parallel()
	namespace := newNamespace(t)
	endpoint := startHub(t, namespace, "hf_tiny")
	startManager(t, namespace, nil)
	volume := t.TempDir()
	if err := os.Chmod(volume, 0o777); err != nil {
		t.Fatal(err)
	}
	claim := claimDirectory(t, namespace, volume, corev1.ReadWriteMany)
	downloaded := func(m *semmoev1.MoEDeployment) {
		m.Spec.Model = semmoev1.ModelSpec{
			Path:   "/models/org/tiny",
			Volume: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim, ReadOnly: true}},
			Source: &semmoev1.ModelSource{HuggingFace: &semmoev1.HuggingFaceSource{Repo: "org/tiny", Endpoint: endpoint}},
		}
	}
	moed := profiledDeployment(namespace, downloaded, func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling.Dataset = &semmoev1.DatasetSpec{OwnText: &semmoev1.OwnText{}}
	})
	create(t, moed)
	waitCondition(t, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, "DownloadFailed", "gated", "Accept its terms", "spec.model.source.huggingFace.tokenSecretRef")
	waitCondition(t, moed, semmoev1.ConditionReady, metav1.ConditionFalse, "DownloadFailed")
	create(t, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "hub"}, StringData: map[string]string{"token": "hf_tiny\n"}})
	update(t, moed, func(m *semmoev1.MoEDeployment) {
		m.Spec.Model.Source.HuggingFace.TokenSecretRef = &semmoev1.SecretKeyReference{Name: "hub"}
	})
	waitCondition(t, moed, semmoev1.ConditionProgressing, metav1.ConditionTrue, "Downloading", "org/tiny", "claim "+claim)
	eventually(t, waitTimeout, "the download reports progress", func() error {
		if status := get(t, moed).Status.Download; status == nil || status.Bytes == 0 || status.Bytes >= status.TotalBytes || status.Commit != "" {
			return fmt.Errorf("status.download is %+v", status)
		}
		return nil
	})
	deleteDownloadPod(t, moed)
	planned := waitPlanned(t, moed)
	if lar := planned.Status.LAR; planned.Status.PlanDigest == "" || lar == nil || lar.PredictedMilli == nil || *lar.PredictedMilli <= *lar.BaselineMilli {
		t.Errorf("the status lacks a plan that is better than the default placement: %+v", planned.Status)
	}
	first := downloadOf(t, moed)
	if first.Found || first.Downloaded == 0 || first.Downloaded >= first.Bytes {
		t.Errorf("the resumed download is %+v, want a part of the bytes", first)
	}
	status := get(t, moed).Status.Download
	if status == nil || status.Commit != first.Commit || status.Bytes != first.Bytes || status.TotalBytes != first.Bytes || int(status.Files) != first.Files {
		t.Errorf("status.download is %+v, want %+v", status, first)
	}
	second := newDeployment(namespace, "second", downloaded)
	create(t, second) // without a token: the model is on the claim already
	waitComplete(t, second)
	if found := downloadOf(t, second); !found.Found || found.Downloaded != 0 || found.Commit != first.Commit {
		t.Errorf("the second deployment downloaded %+v", found)
	}
	eventually(t, waitTimeout, "the second deployment answers", func() error { return sendRequest(t.Context(), serviceURL(t, second), "second") })
}

// downloadJobs returns the download Jobs of a deployment.
func downloadJobs(ctx context.Context, moed *semmoev1.MoEDeployment) ([]batchv1.Job, error) {
	var jobs batchv1.JobList
	err := api.List(ctx, &jobs, client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: semmoev1.ComponentDownload})
	return jobs.Items, err
}

// downloadOf returns the result that the download Job of a deployment keeps.
func downloadOf(t *testing.T, moed *semmoev1.MoEDeployment) report.Result {
	t.Helper()
	var result report.Result
	eventually(t, time.Minute, "one download Job has a result", func() error {
		jobs, err := downloadJobs(t.Context(), moed)
		if err != nil || len(jobs) != 1 {
			return errors.Join(err, fmt.Errorf("%d Jobs", len(jobs)))
		}
		return json.Unmarshal([]byte(jobs[0].Annotations[semmoev1.AnnotationReport]), &result)
	})
	return result
}

// deleteDownloadPod deletes the running download pod.
func deleteDownloadPod(t *testing.T, moed *semmoev1.MoEDeployment) {
	t.Helper()
	eventually(t, time.Minute, "a download pod is deleted", func() error {
		var pods corev1.PodList
		if err := api.List(t.Context(), &pods, client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: semmoev1.ComponentDownload}); err != nil {
			return err
		}
		for i := range pods.Items {
			if pod := &pods.Items[i]; pod.Status.Phase == corev1.PodRunning {
				return client.IgnoreNotFound(api.Delete(t.Context(), pod))
			}
		}
		return fmt.Errorf("no pod runs")
	})
}
