// SPDX-License-Identifier: Apache-2.0

package download

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/model/hub/report"
)

const result = `{"repo":"org/m","commit":"0123456789abcdef0123456789abcdef01234567","files":3,"bytes":4000000000}`

func deployment() *semmoev1.MoEDeployment {
	return &semmoev1.MoEDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "m", UID: "1"},
		Spec: semmoev1.MoEDeploymentSpec{Model: semmoev1.ModelSpec{
			Path:   "/models/m",
			Volume: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "models", ReadOnly: true}},
			Source: &semmoev1.ModelSource{HuggingFace: &semmoev1.HuggingFaceSource{
				Repo: "org/m", Revision: "main", Endpoint: "https://hub.example", TokenSecretRef: &semmoev1.SecretKeyReference{Name: "hub", Key: "token"},
			}},
		}},
	}
}

func job(moed *semmoev1.MoEDeployment, attempt int, condition batchv1.JobConditionType) *batchv1.Job {
	j := Job(moed, "semmoe:1", "", attempt)
	j.UID = types.UID(j.Name)
	if condition != "" {
		j.Status.Conditions = []batchv1.JobCondition{{Type: condition, Status: corev1.ConditionTrue, Message: "because"}}
	}
	return j
}

func pod(j *batchv1.Job, exitCode int32, message string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: j.Name + "-x", OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(j, batchv1.SchemeGroupVersion.WithKind("Job"))}},
		Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{
			State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: exitCode, Message: message}},
		}}},
	}
}

// TestJob checks that the Job writes the volume, that the token is only a reference to its Secret, and which user it runs
// as.
func TestJob(t *testing.T) {
	moed := deployment()
	moed.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
		NodeSelector:    map[string]string{"disk": "fast"},
		SecurityContext: &corev1.PodSecurityContext{FSGroup: ptr.To[int64](4000), RunAsUser: ptr.To[int64](0), RunAsNonRoot: ptr.To(false)},
	}}
	spec := Job(moed, "semmoe:1", corev1.PullNever, 2).Spec.Template.Spec
	container := spec.Containers[0]
	want := []string{"download", "--repo=org/m", "--revision=main", "--endpoint=https://hub.example", "--out=/models/m", "--progress-address=$(POD_IP):9090"}
	if diff := cmp.Diff(want, container.Args); diff != "" {
		t.Errorf("args (-want +got):\n%s", diff)
	}
	if mounts := container.VolumeMounts; len(mounts) != 1 || mounts[0].ReadOnly || spec.Volumes[0].PersistentVolumeClaim.ReadOnly {
		t.Errorf("mounts %+v of %+v, want a writable volume", mounts, spec.Volumes)
	}
	if token := container.Env[1]; token.Name != "HF_TOKEN" || token.Value != "" || token.ValueFrom.SecretKeyRef.Name != "hub" || token.ValueFrom.SecretKeyRef.Key != "token" {
		t.Errorf("variable %+v, want a reference to the Secret", token)
	}
	security := spec.SecurityContext
	if *security.FSGroup != 4000 || security.RunAsUser != nil || !*security.RunAsNonRoot || security.SeccompProfile == nil {
		t.Errorf("security context %+v, want the restricted one with the group of the template", security)
	}
	if spec.NodeSelector["disk"] != "fast" {
		t.Errorf("node selector %v", spec.NodeSelector)
	}
	if len(Job(deployment(), "semmoe:1", "", 1).Name) > 63 {
		t.Error("the name of the Job is too long")
	}
}

func TestObserve(t *testing.T) {
	moed := deployment()
	running, complete, failed := job(moed, 1, ""), job(moed, 1, batchv1.JobComplete), job(moed, 1, batchv1.JobFailed)
	recorded := job(moed, 1, batchv1.JobComplete)
	recorded.Annotations = map[string]string{semmoev1.AnnotationReport: result}
	former := deployment()
	former.Spec.Model.Source.HuggingFace.Revision = "v1"
	other := job(former, 1, "")
	found := &report.Result{Repo: "org/m", Commit: "0123456789abcdef0123456789abcdef01234567", Files: 3, Bytes: 4_000_000_000}
	cases := map[string]struct {
		jobs     []*batchv1.Job
		pods     []*corev1.Pod
		result   *report.Result
		next     int
		failure  string
		invalid  bool
		obsolete []*batchv1.Job
	}{
		"nothing yet":                 {next: 1},
		"running":                     {jobs: []*batchv1.Job{running}},
		"complete":                    {jobs: []*batchv1.Job{complete}, pods: []*corev1.Pod{pod(complete, 0, result)}, result: found},
		"recorded":                    {jobs: []*batchv1.Job{recorded}, result: found},
		"complete, the pod is lost":   {jobs: []*batchv1.Job{complete}, next: 2},
		"gated":                       {jobs: []*batchv1.Job{failed}, pods: []*corev1.Pod{pod(failed, 3, "the repository is gated")}, next: 2, failure: "the repository is gated", invalid: true},
		"interrupted":                 {jobs: []*batchv1.Job{failed}, pods: []*corev1.Pod{pod(failed, 1, "i/o error")}, next: 2, failure: "i/o error"},
		"another download runs":       {jobs: []*batchv1.Job{other}, next: 1, obsolete: []*batchv1.Job{other}},
		"another one runs next to it": {jobs: []*batchv1.Job{other, running}, obsolete: []*batchv1.Job{other}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := Observe(moed, tc.jobs, tc.pods)
			if diff := cmp.Diff(tc.result, got.Result); diff != "" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
			if got.Complete() != (tc.result != nil) || got.NextAttempt != tc.next || got.Failure != tc.failure || got.Invalid != tc.invalid {
				t.Errorf("state %+v, want %+v", got, tc)
			}
			if !slices.Equal(got.Obsolete, tc.obsolete) {
				t.Errorf("obsolete %v, want %v", got.Obsolete, tc.obsolete)
			}
		})
	}
	moed.Spec.Model.Source = nil
	if got := Observe(moed, []*batchv1.Job{recorded}, nil); !got.Complete() || got.NextAttempt != 0 || len(got.Obsolete) != 1 {
		t.Errorf("without a source: %+v, want a complete state that deletes the Job", got)
	}
}

func TestStatus(t *testing.T) {
	moed := deployment()
	wanted := State{Wanted: true}
	if got := wanted.Status(nil); got != nil {
		t.Errorf("status %+v before the Job reports, want none", got)
	}
	wanted.Progress = &report.Progress{Phase: report.Downloading, Bytes: 1_500_000_000, TotalBytes: 4_000_000_000, Files: 1, TotalFiles: 3}
	status := wanted.Status(nil)
	if diff := cmp.Diff(&semmoev1.DownloadStatus{Bytes: 1_500_000_000, TotalBytes: 4_000_000_000, Files: 1, TotalFiles: 3}, status); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	if got, want := wanted.Text(moed, status), "Revision main of org/m is being downloaded to /models/m of claim models: 1.5 of 4.0 GB"; got != want {
		t.Errorf("text %q, want %q", got, want)
	}
	wanted.Progress = nil
	if got := wanted.Status(status); got != status {
		t.Errorf("status %+v while the Job does not answer, want the last one", got)
	}
	wanted.Progress = &report.Progress{Phase: report.Waiting}
	if got := wanted.Text(moed, nil); !strings.Contains(got, "waits for another download") {
		t.Errorf("text %q", got)
	}
	wanted.Result = resultOf(result)
	done := wanted.Status(status)
	if done.Commit == "" || done.Bytes != done.TotalBytes || done.Files != 3 {
		t.Errorf("status %+v of a complete download", done)
	}
	if got := (State{Wanted: true}).Status(done); got != nil {
		t.Errorf("status %+v of another download, want none", got)
	}
}
