// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/artifact/storetest"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/faults"
	"github.com/semmoe/operator/test/tier"
)

const (
	tinyTrace = "../../solver/testdata/tiny-32e-top4.safetensors.zst"
	// patience is the timeout of a wait. It suffices for a solve under the race detector, with parallel tests on few
	// cores.
	patience = 4 * time.Minute
)

var (
	environment *storetest.Environment
	api         client.Client
	modelDigest = strings.Repeat("ab", 32)
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		code = tier.ExitCode(err)
	}
	os.Exit(code)
}

func run(m *testing.M) (int, error) {
	ctrl.SetLogger(zap.New(zap.WriteTo(logFile())))
	var err error
	if environment, err = storetest.Start(context.Background()); err != nil {
		return 1, err
	}
	defer environment.Stop() //nolint:errcheck // the processes end with this one
	if api, err = client.New(environment.Config, client.Options{Scheme: newScheme()}); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// logFile returns the log of the managers: the file in TEST_LOG, or a null device.
func logFile() *os.File {
	name := os.Getenv("TEST_LOG")
	if name == "" {
		name = os.DevNull
	}
	file, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return os.Stderr
	}
	return file
}

func newScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{scheme.AddToScheme, semmoev1.AddToScheme} {
		if err := add(s); err != nil {
			panic(err)
		}
	}
	return s
}

// world is a namespace with a store and a manager that runs the controller.
type world struct {
	t         *testing.T
	namespace string
	store     *storetest.Store
	client    *access.Client
	// manager is the counting transport of the manager that was started last.
	manager *faults.Injector
	stop    func()
}

var worlds atomic.Int32

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, namespace: fmt.Sprintf("plans-%d", worlds.Add(1)), store: environment.Run(t)}
	w.client = w.store.Client(t)
	w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}})
	w.startManager()
	return w
}

func (w *world) startManager() {
	w.t.Helper()
	w.manager = faults.New(faults.Schedule{})
	m, err := ctrl.NewManager(w.manager.Config(environment.Config), ctrl.Options{
		Logger: w.manager.Logger(ctrl.Log),
		Scheme: newScheme(), Metrics: metricsserver.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: ptr.To(true)},
		Cache: cache.Options{DefaultNamespaces: map[string]cache.Config{w.namespace: {}}},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	r := &Reconciler{Client: m.GetClient(), Live: m.GetAPIReader(), Recorder: m.GetEventRecorder("test"), Store: w.store.Access, Now: time.Now}
	if err := r.SetupWithManager(m); err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- m.Start(ctx) }()
	stopped := false
	w.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			w.t.Errorf("the manager returned %v", err)
		}
	}
	w.t.Cleanup(w.stop)
}

func (w *world) create(object client.Object) {
	w.t.Helper()
	if err := api.Create(w.t.Context(), object); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) delete(object client.Object) {
	w.t.Helper()
	if err := api.Delete(w.t.Context(), object); err != nil {
		w.t.Fatal(err)
	}
}

// newProfile creates a profile that is not ready.
func (w *world) newProfile(name string) *semmoev1.AffinityProfile {
	w.t.Helper()
	p := &semmoev1.AffinityProfile{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Spec: semmoev1.AffinityProfileSpec{
			Model:         semmoev1.ModelSpec{Volume: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			Engine:        semmoev1.EngineSpec{Image: "engine"},
			Parallelism:   semmoev1.ParallelismSpec{ExpertParallelSize: 4},
			Dataset:       &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: "texts"}},
			Target:        semmoev1.ProfilingTargetServing,
			DeploymentRef: &semmoev1.DeploymentReference{Name: "tiny"},
		},
	}
	w.create(p)
	return p
}

// complete publishes a trace as the result of a profile, and marks the profile ready.
func (w *world) complete(p *semmoev1.AffinityProfile, trace []byte) {
	w.t.Helper()
	w.completeWith(p, map[string][]byte{profile.TraceFile: trace, profile.CountsFile: []byte("counts"), profile.TokenizerFile: []byte("words")})
}

// completeWith publishes files as the result of a profile, and marks the profile ready.
func (w *world) completeWith(p *semmoev1.AffinityProfile, contents map[string][]byte) {
	w.t.Helper()
	files := map[string]string{}
	for name, content := range contents {
		files[name] = filepath.Join(w.t.TempDir(), name)
		if err := os.WriteFile(files[name], content, 0o600); err != nil {
			w.t.Fatal(err)
		}
	}
	manifest := profile.Manifest{ModelDigest: modelDigest, DatasetDigest: p.Name, Sampling: profile.Sampling{Requests: 1, Tokens: 2, RequestTokens: 3}}
	scope := artifact.Scope{Namespace: w.namespace, Kind: artifact.Profile, ID: manifest.ID()}
	digest, err := profile.Publish(w.t.Context(), w.client, scope, manifest, files)
	if err != nil {
		w.t.Fatal(err)
	}
	w.report(p, manifest.ID(), digest)
}

// report marks a profile ready.
func (w *world) report(p *semmoev1.AffinityProfile, inputs string, digest artifact.Digest) {
	w.t.Helper()
	p.Status = semmoev1.AffinityProfileStatus{
		Inputs: inputs, Result: &semmoev1.ProfileResult{Digest: string(digest)}, Model: &semmoev1.ModelStatus{Digest: modelDigest, Experts: 32},
		Conditions: []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Profiled", LastTransitionTime: metav1.Now()}},
	}
	if err := api.Status().Update(w.t.Context(), p); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) newPlan(name, profile string, change ...func(*semmoev1.PlacementPlan)) *semmoev1.PlacementPlan {
	w.t.Helper()
	p := &semmoev1.PlacementPlan{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Spec:       semmoev1.PlacementPlanSpec{ProfileRef: semmoev1.ProfileReference{Name: profile}, ExpertParallelSize: 4, BatchTokens: 1 << 20, MinimumGainPercent: ptr.To[int32](0)},
	}
	for _, c := range change {
		c(p)
	}
	w.create(p)
	return p
}

// eventually polls until the function returns no error.
func (w *world) eventually(what string, f func() error) {
	w.t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: not within %v: %v", what, patience, err)
		}
	}
}

// wait waits for a condition, and returns the plan with it.
func (w *world) wait(p *semmoev1.PlacementPlan, kind string, status metav1.ConditionStatus, reason string, parts ...string) *semmoev1.PlacementPlan {
	w.t.Helper()
	current := &semmoev1.PlacementPlan{}
	w.eventually(kind+" is "+string(status)+" "+reason, func() error {
		if err := api.Get(w.t.Context(), client.ObjectKeyFromObject(p), current); err != nil {
			return err
		}
		c := meta.FindStatusCondition(current.Status.Conditions, kind)
		if c == nil || c.Status != status || c.Reason != reason || c.ObservedGeneration != current.Generation {
			return fmt.Errorf("conditions %+v", current.Status.Conditions)
		}
		for _, part := range parts {
			if !strings.Contains(c.Message, part) {
				return fmt.Errorf("message %q does not contain %q", c.Message, part)
			}
		}
		return nil
	})
	return current
}

func (w *world) configMap(name string) *corev1.ConfigMap {
	w.t.Helper()
	cm := &corev1.ConfigMap{}
	w.eventually("ConfigMap "+name, func() error {
		return api.Get(w.t.Context(), types.NamespacedName{Namespace: w.namespace, Name: name}, cm)
	})
	return cm
}

// stored lists the plan artifacts in the store, with their storage times. A second solve would change the times.
func (w *world) stored() map[string]time.Time {
	w.t.Helper()
	all, err := w.client.ListAll(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	times := map[string]time.Time{}
	for _, a := range all {
		if a.Kind == artifact.Plan && a.Namespace == w.namespace {
			times[a.Scope.String()+"/"+string(a.Digest)] = a.Modified
		}
	}
	return times
}

// touch triggers a reconciliation of the plans of a profile.
func (w *world) touch(p *semmoev1.AffinityProfile) {
	w.t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"annotations":{"touched":%q}}}`, time.Now())
	if err := api.Patch(w.t.Context(), p, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) wipe(p *semmoev1.PlacementPlan) {
	w.t.Helper()
	w.patchStatus(p, types.JSONPatchType, `[{"op":"remove","path":"/status"}]`)
}

func (w *world) patchStatus(p *semmoev1.PlacementPlan, kind types.PatchType, patch string) {
	w.t.Helper()
	if err := api.Status().Patch(w.t.Context(), p.DeepCopy(), client.RawPatch(kind, []byte(patch))); err != nil {
		w.t.Fatal(err)
	}
}

// twoLayers returns the file of the recorded trace with two of its four layers. The time of a solve is proportional to
// the number of layers.
var twoLayers = sync.OnceValues(func() ([]byte, error) {
	whole, err := trace.Open(context.Background(), tinyTrace)
	if err != nil {
		return nil, err
	}
	var file bytes.Buffer
	err = trace.Write(&file, whole.WithLayers([]int{0, 1}))
	return file.Bytes(), err
})

func traceFile(t *testing.T) []byte {
	t.Helper()
	content, err := twoLayers()
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// facts returns the status without times.
func facts(p *semmoev1.PlacementPlan) semmoev1.PlacementPlanStatus {
	status := *p.Status.DeepCopy()
	for i := range status.Conditions {
		status.Conditions[i].LastTransitionTime = metav1.Time{}
	}
	return status
}
