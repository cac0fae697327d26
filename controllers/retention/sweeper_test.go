// SPDX-License-Identifier: Apache-2.0

package retention

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/artifact/storetest"
	"github.com/semmoe/operator/test/tier"
)

var environment *storetest.Environment

func TestMain(m *testing.M) {
	var err error
	if environment, err = storetest.Start(context.Background()); err != nil {
		os.Exit(tier.ExitCode(err))
	}
	code := m.Run()
	environment.Stop() //nolint:errcheck // the processes end with this one
	os.Exit(code)
}

func newClient(t *testing.T) client.Client {
	t.Helper()
	s := runtime.NewScheme()
	if err := errors.Join(scheme.AddToScheme(s), semmoev1.AddToScheme(s)); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(environment.Config, client.Options{Scheme: s})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestSweep(t *testing.T) {
	ctx, store, api := t.Context(), environment.Run(t), newClient(t)
	artifacts := store.Client(t)
	put := func(namespace string, kind artifact.Kind, id string) {
		t.Helper()
		scope := artifact.Scope{Namespace: namespace, Kind: kind, ID: id}
		if _, err := artifacts.Put(ctx, scope, strings.NewReader(scope.String())); err != nil {
			t.Fatal(err)
		}
	}
	const used, unused = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
	for _, namespace := range []string{"team-a", "team-b"} {
		put(namespace, artifact.Plan, used)
		put(namespace, artifact.Plan, unused)
		if err := api.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}); err != nil {
			t.Fatal(err)
		}
	}
	workload := &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "engines"},
		Spec: appsv1.StatefulSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "b"}, Annotations: map[string]string{semmoev1.AnnotationPlanDigest: strings.Repeat("a", 64)}},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
			},
		},
	}
	if err := api.Create(ctx, workload); err != nil {
		t.Fatal(err)
	}
	left := func(want ...string) {
		t.Helper()
		all, err := artifacts.ListAll(ctx)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, a := range all {
			if scope := a.Namespace + "/" + a.ID; !slices.Contains(got, scope) { // a mark is in the scope of the referenced artifact
				got = append(got, scope)
			}
		}
		for _, scope := range want {
			if !strings.Contains(strings.Join(got, " "), scope) {
				t.Errorf("%s is deleted, want it kept", scope)
			}
		}
		if len(got) != len(want) {
			t.Errorf("remaining artifacts = %v, want %v", got, want)
		}
	}
	sweep := func(s Sweeper) int {
		t.Helper()
		s.Reader, s.Store = api, store.Access
		deleted, err := s.Sweep(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return len(deleted)
	}
	later := func() time.Time { return time.Now().Add(DefaultRetention + time.Hour) }
	all := []string{"team-a/" + used, "team-a/" + unused, "team-b/" + used, "team-b/" + unused}

	if n := sweep(Sweeper{Now: time.Now}); n != 0 {
		t.Errorf("%d young artifacts were deleted", n)
	}
	left(all...)

	profile := &semmoev1.AffinityProfile{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-b", Name: "new"},
		Spec: semmoev1.AffinityProfileSpec{
			Model:       semmoev1.ModelSpec{Volume: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			Engine:      semmoev1.EngineSpec{Image: "engine"},
			Parallelism: semmoev1.ParallelismSpec{ExpertParallelSize: 4},
			Dataset:     &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: "texts"}},
			Target:      semmoev1.ProfilingTargetDedicated,
		},
	}
	if err := api.Create(ctx, profile); err != nil {
		t.Fatal(err)
	}
	if n := sweep(Sweeper{Now: later, Namespaces: []string{"team-b"}}); n != 0 {
		t.Errorf("%d artifacts were deleted although a profile does not reference its artifacts yet", n)
	}
	sweep(Sweeper{Now: later, Namespaces: []string{"team-a"}})
	left("team-a/"+used, "team-b/"+used, "team-b/"+unused)

	if err := api.Delete(ctx, profile); err != nil {
		t.Fatal(err)
	}
	failing := Sweeper{Reader: failingReader{api}, Store: store.Access, Now: later}
	if _, err := failing.Sweep(ctx); err == nil {
		t.Error("Sweep succeeded with an incomplete view")
	}
	left("team-a/"+used, "team-b/"+used, "team-b/"+unused)
	sweep(Sweeper{Now: later, Retention: 1000 * 24 * time.Hour})
	left("team-a/"+used, "team-b/"+used, "team-b/"+unused)
	sweep(Sweeper{Now: later})
	left("team-a/" + used)
}

// TestPeriodStartsAtTheLastReference checks that an old artifact is kept for the retention period after its last
// reference, for any manager.
func TestPeriodStartsAtTheLastReference(t *testing.T) {
	ctx, store, api := t.Context(), environment.Run(t), newClient(t)
	artifacts := store.Client(t)
	const namespace, id = "team-c", "cccccccccccccccc"
	scope := artifact.Scope{Namespace: namespace, Kind: artifact.Plan, ID: id}
	if _, err := artifacts.Put(ctx, scope, strings.NewReader("plan")); err != nil {
		t.Fatal(err)
	}
	if err := api.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}); err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "engine", Annotations: map[string]string{semmoev1.AnnotationPlanDigest: strings.Repeat("c", 64)}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	if err := api.Create(ctx, pod); err != nil {
		t.Fatal(err)
	}
	left := func() int {
		t.Helper()
		all, err := artifacts.List(ctx, scope)
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	sweep := func(after time.Duration) {
		t.Helper()
		s := Sweeper{Reader: api, Store: store.Access, Namespaces: []string{namespace}, Now: func() time.Time { return time.Now().Add(after) }}
		if _, err := s.Sweep(ctx); err != nil {
			t.Fatal(err)
		}
	}
	sweep(0)
	if err := api.Delete(ctx, pod, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	if sweep(DefaultRetention + time.Hour); left() != 2 {
		t.Errorf("%d artifacts remain, want the plan and its mark", left())
	}
	if sweep(DefaultRetention + 25*time.Hour); left() != 0 {
		t.Errorf("%d artifacts remain after the retention period, want none", left())
	}
}

// failingReader fails to list pods.
type failingReader struct{ client.Reader }

func (f failingReader) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	if list.GetObjectKind().GroupVersionKind().Kind == "PodList" {
		return errors.New("failed to list pods")
	}
	return f.Reader.List(ctx, list, options...)
}

func TestSweepWithoutStore(t *testing.T) {
	s := Sweeper{Reader: newClient(t), Store: nil, Now: time.Now}
	if _, err := s.Sweep(t.Context()); !errors.Is(err, access.ErrNoStore) {
		t.Errorf("error = %v, want ErrNoStore", err)
	}
}
