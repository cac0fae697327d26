// SPDX-License-Identifier: Apache-2.0

package affinityprofile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/artifact/storetest"
	recording "github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/internal/profile/counts"
	"github.com/semmoe/operator/internal/router/livesamples"
	"github.com/semmoe/operator/internal/router/managerauth"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
	"github.com/semmoe/operator/test/tier"
)

// routers are fake request routers by address. They always return the same samples.
type routers map[string]*samples

type samples struct {
	trace    *trace.Trace
	none     bool
	requests atomic.Int32
	since    atomic.Value
	broken   bool
}

func (n routers) RoundTrip(request *http.Request) (*http.Response, error) {
	s, known := n[request.URL.Host]
	if !known || s.broken && request.Method == http.MethodGet {
		return nil, errors.New("connection refused")
	}
	s.requests.Add(1)
	s.since.Store(request.URL.Query().Get(livesamples.QuerySince))
	response := &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: http.NoBody}
	if s.none {
		response.StatusCode = http.StatusNotFound
		return response, nil
	}
	response.Header.Set(livesamples.HeaderTokens, fmt.Sprint(len(s.trace.Tokens)))
	var body bytes.Buffer
	var err error
	if request.URL.Path == livesamples.SequencesPath {
		response.Header.Set(livesamples.HeaderRequests, fmt.Sprint(s.trace.Requests()))
		err = trace.Write(&body, s.trace)
	} else {
		m := s.trace.Model
		c := counts.New(counts.Model{Digest: m.Digest, MoELayers: m.Layers, Experts: m.Experts, ExpertsPerToken: m.TopK, Vocabulary: m.Vocabulary})
		c.Add(s.trace.Tokens, s.trace.Experts)
		err = c.WriteCompressed(&body)
	}
	if request.Method == http.MethodGet {
		response.Body = io.NopCloser(&body)
	}
	return response, err
}

// live is a namespace with a store, a deployment with two request routers, and a prior profile.
type live struct {
	t       *testing.T
	api     client.Client
	store   *access.Client
	network routers
	r       *Reconciler
}

const liveDigest = "abababababababababababababababababababababababababababababababab"

func newLive(t *testing.T, environment *storetest.Environment, namespace string) *live {
	t.Helper()
	s := runtime.NewScheme()
	if err := errors.Join(scheme.AddToScheme(s), semmoev1.AddToScheme(s)); err != nil {
		t.Fatal(err)
	}
	api, err := client.New(environment.Config, client.Options{Scheme: s})
	if err != nil {
		t.Fatal(err)
	}
	store := environment.Run(t)
	l := &live{t: t, api: api, store: store.Client(t), network: routers{}}
	l.r = &Reconciler{Client: api, Recorder: events.NewFakeRecorder(100), Routers: managerauth.Identity{HTTP: &http.Client{Transport: l.network}}, Store: store.Access, Now: time.Now}
	l.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
	volume := corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
	moed := &semmoev1.MoEDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "tiny"}, Spec: semmoev1.MoEDeploymentSpec{
		Model: semmoev1.ModelSpec{Volume: volume}, Engine: semmoev1.EngineSpec{Image: "engine"}, Parallelism: semmoev1.ParallelismSpec{ExpertParallelSize: 4},
	}}
	l.create(moed)
	for i := range 2 {
		one := tracetest.Generate(tracetest.Small, uint64(i+1))
		one.Model.Digest = liveDigest
		l.network[fmt.Sprintf("10.1.0.%d:9091", i+1)] = &samples{trace: one}
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprint("router-", i), Labels: map[string]string{
				semmoev1.LabelDeployment: "tiny", semmoev1.LabelComponent: semmoev1.ComponentRouter,
			}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "router", Image: "semmoe"}}},
		}
		l.create(pod)
		pod.Status.PodIP, pod.Status.Phase = fmt.Sprintf("10.1.0.%d", i+1), corev1.PodRunning
		pod.Status.PodIPs = []corev1.PodIP{{IP: pod.Status.PodIP}}
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		if err := api.Status().Update(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

func (l *live) create(object client.Object) {
	l.t.Helper()
	if err := l.api.Create(l.t.Context(), object); err != nil {
		l.t.Fatal(err)
	}
}

// prior publishes a profile of a data set and marks it ready.
func (l *live) prior(namespace string) {
	l.t.Helper()
	recorded := tracetest.Generate(tracetest.Small, 9)
	var file bytes.Buffer
	if err := trace.Write(&file, recorded); err != nil {
		l.t.Fatal(err)
	}
	files := map[string]string{}
	for name, content := range map[string][]byte{recording.TraceFile: file.Bytes(), recording.CountsFile: []byte("counts"), recording.TokenizerFile: []byte("words"), recording.EmbeddingsFile: []byte("vectors")} {
		files[name] = filepath.Join(l.t.TempDir(), name)
		if err := os.WriteFile(files[name], content, 0o600); err != nil {
			l.t.Fatal(err)
		}
	}
	manifest := recording.Manifest{ModelDigest: liveDigest, DatasetDigest: "d", Sampling: recording.Sampling{Requests: 1, Tokens: 2, RequestTokens: 3}}
	digest, err := recording.Publish(l.t.Context(), l.store, artifact.Scope{Namespace: namespace, Kind: artifact.Profile, ID: manifest.ID()}, manifest, files)
	if err != nil {
		l.t.Fatal(err)
	}
	p := newProfile(serving, func(p *semmoev1.AffinityProfile) {
		p.ObjectMeta = metav1.ObjectMeta{Namespace: namespace, Name: "prior"}
	})
	l.create(p)
	p.Status = semmoev1.AffinityProfileStatus{
		Inputs: manifest.ID(), Result: &semmoev1.ProfileResult{Digest: string(digest)}, Model: &semmoev1.ModelStatus{Digest: liveDigest, Family: "qwen3_moe", Experts: 16},
		Conditions: []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Profiled", LastTransitionTime: metav1.Now()}},
	}
	if err := l.api.Status().Update(l.t.Context(), p); err != nil {
		l.t.Fatal(err)
	}
}

func (l *live) profile(namespace, name string, samples semmoev1.LiveSamples, tokens int32) *semmoev1.AffinityProfile {
	l.t.Helper()
	p := newProfile(serving, func(p *semmoev1.AffinityProfile) {
		p.ObjectMeta = metav1.ObjectMeta{Namespace: namespace, Name: name}
		p.Spec.DeploymentRef.Name = "tiny"
		p.Spec.Target, p.Spec.Dataset = semmoev1.ProfilingTargetLive, nil
		p.Spec.SamplingSpec = semmoev1.SamplingSpec{Requests: 10, Tokens: tokens, RequestTokens: 512}
		p.Spec.Live = &semmoev1.LiveSpec{Samples: samples, PriorProfileRef: semmoev1.ProfileReference{Name: "prior"}}
	})
	l.create(p)
	return p
}

// reconcile runs the controller once, with empty memory like a new manager, and returns the Ready condition of the
// profile.
func (l *live) reconcile(p *semmoev1.AffinityProfile) *metav1.Condition {
	l.t.Helper()
	if _, err := l.r.Reconcile(l.t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(p)}); err != nil {
		l.t.Fatal(err)
	}
	if err := l.api.Get(l.t.Context(), client.ObjectKeyFromObject(p), p); err != nil {
		l.t.Fatal(err)
	}
	return meta.FindStatusCondition(p.Status.Conditions, semmoev1.ConditionReady)
}

func TestLiveProfile(t *testing.T) {
	environment, err := storetest.Start(context.Background())
	tier.Require(t, err)
	defer environment.Stop() //nolint:errcheck // the processes end with the test
	const namespace = "live"
	l := newLive(t, environment, namespace)
	expect := func(p *semmoev1.AffinityProfile, reason string, parts ...string) {
		t.Helper()
		ready := l.reconcile(p)
		if ready.Reason != reason {
			t.Fatalf("profile %s: reason %s (%s), want %s", p.Name, ready.Reason, ready.Message, reason)
		}
		for _, part := range parts {
			if !strings.Contains(ready.Message, part) {
				t.Errorf("%s: message %q does not contain %q", p.Name, ready.Message, part)
			}
		}
	}
	one, two := l.network["10.1.0.1:9091"], l.network["10.1.0.2:9091"]
	have := int32(len(one.trace.Tokens) + len(two.trace.Tokens))
	p := l.profile(namespace, "p", semmoev1.LiveSamplesSequences, 1000)
	expect(p, "WaitingForInputs", "prior")
	l.prior(namespace)

	many := l.profile(namespace, "many", semmoev1.LiveSamplesSequences, 1_000_000)
	if have < 25000 {
		expect(many, "WaitingForSamples", "25000 tokens of 10 requests")
		if progress := many.Status.Progress; progress == nil || progress.RequestsDone != have || progress.RequestsTotal != 25000 {
			t.Errorf("progress = %+v, the routers have %d tokens", progress, have)
		}
	}
	one.none, two.none = true, true
	expect(p, "NoLiveSamples", "liveSamples")
	one.none, two.none = false, false
	two.broken = true
	expect(p, "ProfilingFailed", "router-1")
	two.broken = false

	expect(p, "Profiled")
	if want := p.CreationTimestamp.UTC().Format(time.RFC3339); one.since.Load() != want {
		t.Errorf("samples requested since %v, want %v", one.since.Load(), want)
	}
	if p.Status.Model == nil || p.Status.Model.Digest != liveDigest || p.Status.Model.Experts != 16 {
		t.Errorf("model %+v", p.Status.Model)
	}
	manifest := l.manifest(p)
	if !manifest.HasTrace() || manifest.Live.Samples != recording.LiveSequences || manifest.Files[recording.TokenizerFile] == "" || manifest.Files[recording.EmbeddingsFile] == "" || manifest.Summary.Requests != 10 {
		t.Errorf("manifest %+v", manifest)
	}
	result, requests := *p.Status.Result, one.requests.Load()

	// A lost status is restored from the store, and the routers are not queried again.
	p.Status = semmoev1.AffinityProfileStatus{}
	if err := l.api.Status().Update(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	expect(p, "Profiled")
	if *p.Status.Result != result || one.requests.Load() != requests || p.Status.Model == nil {
		t.Errorf("result after the loss of the status = %+v, want %+v; %d requests to a router, want %d", *p.Status.Result, result, one.requests.Load(), requests)
	}
	before := p.ResourceVersion
	if expect(p, "Profiled"); p.ResourceVersion != before {
		t.Error("a complete profile was written again")
	}

	counted := l.profile(namespace, "counted", semmoev1.LiveSamplesCounts, 1000)
	expect(counted, "Profiled")
	if manifest := l.manifest(counted); manifest.HasTrace() || int32(manifest.Summary.Tokens) != have || counted.Status.Result.TracedTokens != 0 {
		t.Errorf("manifest %+v", manifest)
	}
	if counted.Status.Inputs == p.Status.Inputs {
		t.Error("two live profiles have the same inputs")
	}
	// A profile that contains only counts can be the prior profile.
	next := l.profileAfter(namespace, "next", "counted")
	expect(next, "Profiled")
	if l.manifest(next).Files[recording.EmbeddingsFile] == "" {
		t.Error("the embeddings are lost after two live profiles")
	}
}

func (l *live) profileAfter(namespace, name, prior string) *semmoev1.AffinityProfile {
	l.t.Helper()
	p := newProfile(serving, func(p *semmoev1.AffinityProfile) {
		p.ObjectMeta = metav1.ObjectMeta{Namespace: namespace, Name: name}
		p.Spec.DeploymentRef.Name = "tiny"
		p.Spec.Target, p.Spec.Dataset = semmoev1.ProfilingTargetLive, nil
		p.Spec.SamplingSpec.Tokens = 1000
		p.Spec.Live = &semmoev1.LiveSpec{Samples: semmoev1.LiveSamplesCounts, PriorProfileRef: semmoev1.ProfileReference{Name: prior}}
	})
	l.create(p)
	return p
}

func (l *live) manifest(p *semmoev1.AffinityProfile) recording.Manifest {
	l.t.Helper()
	scope := artifact.Scope{Namespace: p.Namespace, Kind: artifact.Profile, ID: p.Status.Inputs}
	manifest, err := recording.FetchManifest(l.t.Context(), l.store, scope, artifact.Digest(p.Status.Result.Digest))
	if err != nil {
		l.t.Fatal(err)
	}
	return manifest
}
