// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/faults"
	"github.com/semmoe/operator/test/tier"
)

// newProfile returns a profile of the small model with a dedicated engine and the data set of requests().
func newProfile(namespace, name string, change ...func(*semmoev1.AffinityProfile)) *semmoev1.AffinityProfile {
	moed := newDeployment(namespace, "unused")
	p := &semmoev1.AffinityProfile{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: semmoev1.AffinityProfileSpec{
			Model: moed.Spec.Model, Engine: moed.Spec.Engine, Parallelism: moed.Spec.Parallelism,
			Dataset:      &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: "requests"}},
			SamplingSpec: semmoev1.SamplingSpec{Requests: 50, Tokens: 5000, RequestTokens: 64},
			Target:       semmoev1.ProfilingTargetDedicated,
		},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

// requests returns a ConfigMap with a data set of n requests.
func requests(t *testing.T, namespace string, n int) *corev1.ConfigMap {
	t.Helper()
	var lines strings.Builder
	for i := range n {
		text := fmt.Sprintf("func f%d(x int) int {\n\treturn x*%d + %d\n}\n\nThe sum of %d and %d is %d.", i, i, 7*i, i, i+1, 2*i+1)
		line, err := json.Marshal(map[string]string{"prompt": text, "domain": []string{"even", "odd"}[i%2]})
		if err != nil {
			t.Fatal(err)
		}
		lines.Write(append(line, '\n'))
	}
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "requests"}, Data: map[string]string{"dataset.jsonl": lines.String()}}
}

func getProfile(t *testing.T, p *semmoev1.AffinityProfile) *semmoev1.AffinityProfile {
	t.Helper()
	current := &semmoev1.AffinityProfile{}
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(p), current); err != nil {
		t.Fatal(err)
	}
	return current
}

// waitProfile waits until a condition of a profile has the given status and reason and its message contains all parts.
func waitProfile(t *testing.T, within time.Duration, p *semmoev1.AffinityProfile, kind string, status metav1.ConditionStatus, reason string, parts ...string) *semmoev1.AffinityProfile {
	t.Helper()
	var current *semmoev1.AffinityProfile
	eventually(t, within, fmt.Sprintf("%s of profile %s is %s %s", kind, p.Name, status, reason), func() error {
		current = getProfile(t, p)
		c := meta.FindStatusCondition(current.Status.Conditions, kind)
		if c == nil || c.Status != status || c.Reason != reason || c.ObservedGeneration != current.Generation {
			return fmt.Errorf("conditions %+v", current.Status.Conditions)
		}
		for _, part := range parts {
			if !strings.Contains(c.Message, part) {
				return fmt.Errorf("the message %q lacks %q", c.Message, part)
			}
		}
		return nil
	})
	return current
}

func waitProfiled(t *testing.T, p *semmoev1.AffinityProfile) *semmoev1.AffinityProfile {
	t.Helper()
	return waitProfile(t, waitTimeout, p, semmoev1.ConditionReady, metav1.ConditionTrue, "Profiled")
}

// deleteAndWait deletes an object with its dependents, and waits until the object is gone.
func deleteAndWait(t *testing.T, object client.Object) {
	t.Helper()
	uid := object.GetUID()
	if err := api.Delete(t.Context(), object, client.PropagationPolicy(metav1.DeletePropagationForeground)); err != nil {
		t.Fatal(err)
	}
	eventually(t, waitTimeout, kindOf(object)+" is deleted", func() error {
		current := object.DeepCopyObject().(client.Object)
		err := api.Get(t.Context(), client.ObjectKeyFromObject(object), current)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		if err == nil && current.GetUID() == uid {
			return errors.New("the object still exists")
		}
		return nil
	})
}

func listProfilingJobs(t *testing.T, p *semmoev1.AffinityProfile) []batchv1.Job {
	t.Helper()
	var jobs batchv1.JobList
	if err := api.List(t.Context(), &jobs, client.InNamespace(p.Namespace),
		client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentProfile, semmoev1.LabelProfile: p.Name}); err != nil {
		t.Fatal(err)
	}
	return jobs.Items
}

// waitProfilingJob waits for a Job of the profile that is not among the known ones.
func waitProfilingJob(t *testing.T, p *semmoev1.AffinityProfile, known ...types.UID) *batchv1.Job {
	t.Helper()
	var found *batchv1.Job
	eventually(t, waitTimeout, "a profiling Job", func() error {
		for _, job := range listProfilingJobs(t, p) {
			isKnown := false
			for _, uid := range known {
				isKnown = isKnown || uid == job.UID
			}
			if !isKnown && job.DeletionTimestamp == nil {
				found = &job
				return nil
			}
		}
		return fmt.Errorf("%s", describe(t, p))
	})
	return found
}

func describe(t *testing.T, p *semmoev1.AffinityProfile) string {
	t.Helper()
	ready := meta.FindStatusCondition(getProfile(t, p).Status.Conditions, semmoev1.ConditionReady)
	return fmt.Sprintf("no Job; Ready is %+v", ready)
}

// waitProfilingPod waits for a running pod of a Job.
func waitProfilingPod(t *testing.T, job *batchv1.Job, known ...types.UID) *corev1.Pod {
	t.Helper()
	var found *corev1.Pod
	eventually(t, waitTimeout, "a running pod of Job "+job.Name, func() error {
		var pods corev1.PodList
		if err := api.List(t.Context(), &pods, client.InNamespace(job.Namespace), client.MatchingLabels{batchv1.JobNameLabel: job.Name}); err != nil {
			return err
		}
		for _, pod := range pods.Items {
			if len(known) > 0 && known[0] == pod.UID || pod.DeletionTimestamp != nil || pod.Status.Phase != corev1.PodRunning {
				continue
			}
			found = &pod
			return nil
		}
		return fmt.Errorf("%d pods", len(pods.Items))
	})
	return found
}

// queueing suspends new Jobs with a queue, like the webhook of Kueue.
const queueing = `
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata:
  name: queueing
spec:
  failurePolicy: Fail
  reinvocationPolicy: Never
  matchConstraints:
    objectSelector:
      matchExpressions: [{key: kueue.x-k8s.io/queue-name, operator: Exists}]
    resourceRules:
    - {apiGroups: [batch], apiVersions: [v1], operations: [CREATE], resources: [jobs]}
  mutations:
  - patchType: ApplyConfiguration
    applyConfiguration: {expression: "Object{spec: Object.spec{suspend: true}}"}
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata:
  name: queueing
spec:
  policyName: queueing
`

// TestProfileQueued records a profile in a queue. A Job that is suspended, before it starts and while it runs, is
// reported as queued and not as failed, and no other Job is created. The Job controller stops and starts its pods.
func TestProfileQueued(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	file := filepath.Join(t.TempDir(), "queueing.yaml")
	if err := os.WriteFile(file, []byte(queueing), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := applyAll(t.Context(), file); err != nil {
		t.Fatal(err)
	}
	eventually(t, waitTimeout, "new Jobs are suspended", func() error {
		probe := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "probe", Labels: map[string]string{semmoev1.LabelQueue: "gpus"}}}
		probe.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "a", Image: "a"}}}
		if err := api.Create(t.Context(), probe, client.DryRunAll); err != nil || !ptr.Deref(probe.Spec.Suspend, false) {
			return fmt.Errorf("the Job is not suspended: error %v", err)
		}
		return nil
	})
	startManager(t, namespace, nil)
	create(t, requests(t, namespace, 60))
	p := newProfile(namespace, "tiny", func(p *semmoev1.AffinityProfile) { p.Labels = map[string]string{semmoev1.LabelQueue: "gpus"} })
	create(t, p)
	job := waitProfilingJob(t, p)
	suspend := func(value bool) {
		t.Helper()
		patch := fmt.Appendf(nil, `{"spec":{"suspend":%t}}`, value)
		if err := api.Patch(t.Context(), job, client.RawPatch(types.MergePatchType, patch)); err != nil {
			t.Fatal(err)
		}
	}
	queued := func() {
		t.Helper()
		eventually(t, waitTimeout, "the profile is queued, and its Job has no pods", func() error {
			if err := api.Get(t.Context(), client.ObjectKeyFromObject(job), job); err != nil {
				return err
			}
			current := getProfile(t, p)
			if meta.IsStatusConditionTrue(current.Status.Conditions, semmoev1.ConditionDegraded) || job.Status.Failed > 0 {
				t.Fatalf("a suspended Job counts as failed: %+v, %+v", current.Status.Conditions, job.Status)
			}
			suspended := slices.ContainsFunc(job.Status.Conditions, func(c batchv1.JobCondition) bool {
				return c.Type == batchv1.JobSuspended && c.Status == corev1.ConditionTrue
			})
			if ready := meta.FindStatusCondition(current.Status.Conditions, semmoev1.ConditionReady); ready == nil || ready.Reason != "Queued" || !suspended || job.Status.Active > 0 {
				return fmt.Errorf("Ready is %+v, the Job %+v", ready, job.Status)
			}
			return nil
		})
	}
	queued()
	suspend(false)
	waitProfilingPod(t, job)
	suspend(true) // another workload takes the quota
	queued()
	suspend(false)
	waitProfiled(t, p)
	if jobs := listProfilingJobs(t, p); len(jobs) != 1 || jobs[0].UID != job.UID {
		t.Errorf("%d Jobs recorded the profile, want the queued one", len(jobs))
	}
}

// TestProfileDedicated takes a profile with a dedicated engine from end to end, and checks that no part is done twice.
func TestProfileDedicated(t *testing.T) {
	t.Parallel()
	namespace := newNamespace(t)
	stop := startManager(t, namespace, nil)
	create(t, requests(t, namespace, 60))
	p := newProfile(namespace, "tiny")
	create(t, p)
	done := waitProfiled(t, p)
	result := done.Status.Result
	if result == nil || result.Requests != 50 || result.Tokens < 1000 || result.TracedTokens != result.Tokens || result.CoverageMilli == 0 || result.SkewMilli <= 1000 {
		t.Fatalf("the result is %+v", result)
	}
	if done.Status.Model == nil || done.Status.Model.Experts != 32 || done.Status.Inputs == "" || done.Status.Progress != nil {
		t.Errorf("the status is %+v", done.Status)
	}
	for kind, want := range map[string]metav1.ConditionStatus{
		semmoev1.ConditionProgressing: metav1.ConditionFalse, semmoev1.ConditionDegraded: metav1.ConditionFalse,
		semmoev1.ConditionStalled: metav1.ConditionFalse, semmoev1.ConditionReconciling: metav1.ConditionFalse,
	} {
		if c := meta.FindStatusCondition(done.Status.Conditions, kind); c == nil || c.Status != want {
			t.Errorf("condition %s: %+v", kind, c)
		}
	}
	checkStoredProfile(t, done)
	jobs := listProfilingJobs(t, p)
	if len(jobs) != 1 || jobs[0].Name != "profile-"+done.Status.Inputs+"-1" {
		t.Fatalf("%d Jobs", len(jobs))
	}
	suite := t // objects created in a subtest live until the end of the test
	again := func(t *testing.T) {
		t.Helper()
		now := waitProfiled(t, p)
		if diff := cmp.Diff(result, now.Status.Result); diff != "" {
			t.Errorf("the result changed (-want +got):\n%s", diff)
		}
	}
	noMoreJobs := func(t *testing.T, want int) {
		t.Helper()
		again(t)
		if jobs := listProfilingJobs(t, p); len(jobs) != want {
			t.Errorf("%d profiling Jobs, want %d", len(jobs), want)
		}
	}
	t.Run("the status is wiped", func(t *testing.T) {
		base := getProfile(t, p)
		wiped := base.DeepCopy()
		wiped.Status = semmoev1.AffinityProfileStatus{}
		if err := api.Status().Patch(t.Context(), wiped, client.MergeFrom(base)); err != nil {
			t.Fatal(err)
		}
		noMoreJobs(t, 1)
	})
	t.Run("finished Jobs are deleted", func(t *testing.T) {
		deleteAndWait(t, &jobs[0])
		noMoreJobs(t, 0)
		if err := api.DeleteAllOf(t.Context(), &batchv1.Job{}, client.InNamespace(namespace), client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
			t.Fatal(err)
		}
		// Without its inspection Job the profile does not know its inputs. It inspects them again, on a CPU.
		eventually(t, waitTimeout, "the inspection Job is recreated", func() error {
			var inspections batchv1.JobList
			if err := api.List(t.Context(), &inspections, client.InNamespace(namespace), client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentInspect}); err != nil {
				return err
			}
			for _, job := range inspections.Items {
				if job.Annotations[semmoev1.AnnotationReport] != "" && job.DeletionTimestamp == nil {
					return nil
				}
			}
			return fmt.Errorf("%d inspection Jobs", len(inspections.Items))
		})
		noMoreJobs(t, 0)
	})
	t.Run("another profile has the same inputs and the operator restarts", func(t *testing.T) {
		other := newProfile(namespace, "other", func(p *semmoev1.AffinityProfile) { p.Spec.Engine.Image = "nobody/nothing:1" })
		create(t, other)
		if got := waitProfiled(t, other).Status.Result; !cmp.Equal(got, result) {
			t.Errorf("the other profile's result differs: %+v", got)
		}
		stop()
		stop = startManager(suite, namespace, nil)
		noMoreJobs(t, 0)
	})
	t.Run("steady", func(t *testing.T) {
		stop()
		counting := faults.New(faults.Schedule{})
		endCounting := startManager(t, namespace, counting)
		before := getProfile(t, p).ResourceVersion
		reconcileSteadily(t, counting, 2*time.Second, func() int { // another writer changes fields of the profile that the operator does not manage
			base := getProfile(t, p)
			touched := base.DeepCopy()
			touched.Annotations = map[string]string{"touched": time.Now().String()}
			if err := api.Patch(t.Context(), touched, client.MergeFrom(base)); err != nil {
				t.Fatal(err)
			}
			return 1
		})
		endCounting()
		if writes := counting.Writes(); writes != 0 || getProfile(t, p).ResourceVersion == before {
			t.Errorf("%d writes in steady state, want none", writes)
		}
		stop = startManager(suite, namespace, nil)
	})
	t.Run("the profile is deleted and recreated", func(t *testing.T) {
		deleteAndWait(t, getProfile(t, p))
		p = newProfile(namespace, "tiny")
		create(t, p)
		noMoreJobs(t, 0)
	})
}

// checkStoredProfile reads the profile's files like the planner.
func checkStoredProfile(t *testing.T, p *semmoev1.AffinityProfile) {
	t.Helper()
	store, err := startStore(t).Client(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	scope := artifact.Scope{Namespace: p.Namespace, Kind: artifact.Profile, ID: p.Status.Inputs}
	manifest, err := profile.FetchManifest(t.Context(), store, scope, artifact.Digest(p.Status.Result.Digest))
	if err != nil {
		t.Fatal(err)
	}
	if manifest.ModelDigest != p.Status.Model.Digest || len(manifest.Files) != 4 { // trace, counts, tokenizer, token embeddings
		t.Errorf("manifest %+v", manifest)
	}
	reader, err := store.Get(t.Context(), scope, manifest.Files[profile.TraceFile])
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	recorded, err := trace.Read(reader, trace.MaxBytes)
	if err != nil {
		t.Fatal(err)
	}
	if recorded.Requests() != 50 || int64(len(recorded.Tokens)) != p.Status.Result.Tokens || !cmp.Equal(recorded.Model.Domains, []string{"even", "odd"}) {
		t.Errorf("%d requests of %d tokens, domains %v", recorded.Requests(), len(recorded.Tokens), recorded.Model.Domains)
	}
}

// TestProfileFailureConditions checks that a condition reports each failure within a minute, and that a failure costs at most one
// Job with devices.
func TestProfileFailureConditions(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	configMap := func(name, text string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"dataset.jsonl": text}}
	}
	cases := map[string]struct {
		change  func(*semmoev1.AffinityProfile)
		with    *corev1.ConfigMap // created before the profile
		reason  string
		stalls  bool
		jobs    int
		message []string
		repair  *corev1.ConfigMap // repairs the failure; nil: nothing repairs it
	}{
		"no ConfigMap": {
			change:  func(p *semmoev1.AffinityProfile) { p.Spec.Dataset.ConfigMap.Name = "absent" },
			reason:  "VolumeNotMounted",
			message: []string{"absent", "create the ConfigMap"},
			repair:  configMap("absent", "{\"prompt\": \"func main() {\"}\n"),
		},
		"no claim": {
			change: func(p *semmoev1.AffinityProfile) {
				p.Spec.Dataset = &semmoev1.DatasetSpec{PersistentVolumeClaim: &semmoev1.DatasetClaim{ClaimName: "absent-claim", Path: "d.jsonl"}}
			},
			reason:  "Unschedulable",
			message: []string{`persistentvolumeclaim "absent-claim" not found`},
		},
		"no such file": {
			change: func(p *semmoev1.AffinityProfile) {
				p.Spec.Dataset = &semmoev1.DatasetSpec{Path: "/models/nowhere.jsonl"}
			},
			reason:  "DatasetInvalid",
			stalls:  true,
			message: []string{"/models/nowhere.jsonl", "does not exist"},
		},
		"malformed": {
			change:  func(p *semmoev1.AffinityProfile) { p.Spec.Dataset.ConfigMap.Name = "malformed" },
			with:    configMap("malformed", "{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n"),
			reason:  "DatasetInvalid",
			stalls:  true,
			message: []string{"/dataset/dataset.jsonl", "line 2", "must have exactly one"},
		},
		"empty": {
			change:  func(p *semmoev1.AffinityProfile) { p.Spec.Dataset.ConfigMap.Name = "empty" },
			with:    configMap("empty", "\n"),
			reason:  "DatasetInvalid",
			stalls:  true,
			message: []string{"the file is empty"},
		},
		"an image that cannot be pulled": {
			change:  func(p *semmoev1.AffinityProfile) { p.Spec.Engine.Image = "nobody/nothing:1"; p.Spec.Requests = 11 },
			reason:  "ImagePullFailed",
			jobs:    1,
			message: []string{`"nobody/nothing:1"`, "spec.engine.image"},
		},
		"an engine that exits at start": {
			change: func(p *semmoev1.AffinityProfile) {
				p.Spec.Engine.Args = []string{"--no-such-flag"}
				p.Spec.Requests = 12
			},
			reason:  "EngineFailed",
			stalls:  true,
			jobs:    1,
			message: []string{"exit code 2", "unknown flag: --no-such-flag", "delete Job"},
		},
		"more devices than available": {
			change: func(p *semmoev1.AffinityProfile) {
				p.Spec.Parallelism.ResourceName = "example.com/none"
				p.Spec.Requests = 13
			},
			reason:  "Unschedulable",
			jobs:    1,
			message: []string{"Insufficient example.com/none"},
		},
		"EP size": {
			change:  func(p *semmoev1.AffinityProfile) { p.Spec.Parallelism.ExpertParallelSize = 5 },
			reason:  "InvalidExpertParallelSize",
			stalls:  true,
			message: []string{"spec.parallelism.expertParallelSize", "1, 2, 4, 8, 16, 32"},
		},
		"no deployment": {
			change: func(p *semmoev1.AffinityProfile) {
				p.Spec.Target, p.Spec.DeploymentRef = semmoev1.ProfilingTargetServing, &semmoev1.DeploymentReference{Name: "nobody"}
				p.Spec.Requests = 14
			},
			reason:  "WaitingForDeployment",
			message: []string{`MoEDeployment "nobody" does not exist`},
		},
	}
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	create(t, requests(t, namespace, 20))
	i := 0
	for name, tc := range cases {
		p := newProfile(namespace, fmt.Sprintf("fault-%d", i), tc.change)
		i++
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if tc.with != nil {
				tc.with.Namespace = namespace
				create(t, tc.with)
			}
			create(t, p)
			waitProfile(t, time.Minute, p, semmoev1.ConditionReady, metav1.ConditionFalse, tc.reason, tc.message...)
			stalled := metav1.ConditionFalse
			if tc.stalls {
				stalled = metav1.ConditionTrue
			}
			if c := meta.FindStatusCondition(getProfile(t, p).Status.Conditions, semmoev1.ConditionStalled); c == nil || c.Status != stalled {
				t.Errorf("Stalled is %+v, want %s", c, stalled)
			}
			if jobs := listProfilingJobs(t, p); len(jobs) != tc.jobs {
				t.Errorf("%d profiling Jobs, want %d", len(jobs), tc.jobs)
			}
			if tc.repair != nil {
				tc.repair.Namespace = namespace
				create(t, tc.repair)
				waitProfiled(t, p)
			}
		})
	}
}

// TestProfileInterrupted evicts the pod of a Job, which is retried, and deletes the Job, which is recreated. The end
// state shows neither interruption.
func TestProfileInterrupted(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	long := requests(t, namespace, 400)
	for line := range strings.Lines(long.Data["dataset.jsonl"]) { // long enough for two interruptions
		long.Data["dataset.jsonl"] = strings.ReplaceAll(long.Data["dataset.jsonl"], line, strings.Replace(line, "func", strings.Repeat("func main() { return }; ", 60), 1))
	}
	create(t, long)
	p := newProfile(namespace, "tiny", func(p *semmoev1.AffinityProfile) { p.Spec.SamplingSpec = semmoev1.SamplingSpec{Requests: 400} })
	create(t, p)
	first := waitProfilingJob(t, p)
	pod := waitProfilingPod(t, first)
	eventually(t, waitTimeout, "progress is reported", func() error {
		current := getProfile(t, p)
		if progress := current.Status.Progress; progress == nil || progress.RequestsTotal != 400 || progress.RequestsDone == 0 {
			return fmt.Errorf("progress %+v, result %+v", progress, current.Status.Result)
		}
		return nil
	})
	eviction := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}}
	if err := api.SubResource("eviction").Create(t.Context(), pod, eviction); err != nil {
		t.Fatal(err)
	}
	again := waitProfilingPod(t, first, pod.UID)
	eventually(t, waitTimeout, "the second pod reports progress", func() error { // a process that has just started ignores SIGTERM and could finish its work
		response, err := podClient(t).Get("http://" + again.Status.PodIP + ":9090" + profile.ProgressPath)
		if err != nil {
			return err
		}
		response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return errors.New(response.Status)
		}
		return nil
	})
	jobs := listProfilingJobs(t, p)
	if len(jobs) != 1 || jobs[0].UID != first.UID || jobs[0].Status.Failed != 0 {
		t.Errorf("the eviction created another Job or counted as a failure: %d Jobs, status of the first: %+v", len(jobs), jobs[0].Status)
	}
	if c := meta.FindStatusCondition(getProfile(t, p).Status.Conditions, semmoev1.ConditionDegraded); c == nil || c.Status != metav1.ConditionFalse {
		t.Errorf("Degraded is %+v", c)
	}
	// When the Job is deleted before it is done, it is recreated with the same name after the old one is gone.
	if err := api.Delete(t.Context(), first, client.PropagationPolicy(metav1.DeletePropagationForeground)); err != nil {
		t.Fatal(err)
	}
	next := waitProfilingJob(t, p, first.UID)
	if next.Name != first.Name {
		t.Errorf("the next Job is %s, want %s", next.Name, first.Name)
	}
	// This profile records 200,000 tokens while all other tests run.
	done := waitProfile(t, 3*waitTimeout, p, semmoev1.ConditionReady, metav1.ConditionTrue, "Profiled")
	if done.Status.Result.Requests != 400 {
		t.Errorf("the result is %+v", done.Status.Result)
	}
}

// TestProfileReplacedDataset replaces a data set after its inspection, while the profile waits for its
// deployment. The new content is profiled with one more inspection and one more Job, and no user action is required.
func TestProfileReplacedDataset(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	create(t, requests(t, namespace, 20))
	p := newProfile(namespace, "tiny", func(p *semmoev1.AffinityProfile) {
		p.Spec.Target, p.Spec.DeploymentRef = semmoev1.ProfilingTargetServing, &semmoev1.DeploymentReference{Name: "late"}
	})
	create(t, p)
	before := waitProfile(t, waitTimeout, p, semmoev1.ConditionReady, metav1.ConditionFalse, "WaitingForDeployment", `MoEDeployment "late" does not exist`)
	if err := api.Update(t.Context(), requests(t, namespace, 30)); err != nil {
		t.Fatal(err)
	}
	late := newDeployment(namespace, "late")
	late.Spec.Routing.SamplePercent = ptr.To[int32](1) // makes its engine return routed experts
	create(t, late)
	done := waitProfiled(t, p)
	if done.Status.Inputs == before.Status.Inputs || done.Status.Result.Requests != 30 {
		t.Errorf("profile inputs %s have %d requests, want 30 requests and inputs that differ from %s", done.Status.Inputs, done.Status.Result.Requests, before.Status.Inputs)
	}
	if jobs := listProfilingJobs(t, p); len(jobs) != 2 {
		t.Errorf("%d profiling Jobs, want 2: one that found the replaced data set and one that recorded it", len(jobs))
	}
}
