// SPDX-License-Identifier: Apache-2.0

package watchmetrics

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/semmoe/operator/test/metricsdoc"
)

func forbidden() error {
	return fmt.Errorf("failed to list: %w", apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", errors.New("no right")))
}

func TestMetrics(t *testing.T) {
	now := time.Unix(1e9, 0)
	refusals := New(func() time.Time { return now })
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(refusals)
	series := func() int {
		t.Helper()
		count, err := testutil.GatherAndCount(registry)
		if err != nil {
			t.Fatal(err)
		}
		return count
	}
	refusals.failed("*v1.Pod", apierrors.NewTooManyRequests("later", 1))
	refusals.failed("*v1.Pod", errors.New("connection refused"))
	if n := series(); n != 0 {
		t.Errorf("%d series for transient errors, want none", n)
	}
	refusals.failed("*v1.Pod", forbidden())
	refusals.failed("*v1alpha1.MoEDeployment", apierrors.NewUnauthorized("who are you"))
	want := `
# HELP semmoe_watch_refused 1 for a kind that this manager is no longer allowed to list or watch; absent for other kinds.
# TYPE semmoe_watch_refused gauge
semmoe_watch_refused{kind="MoEDeployment"} 1
semmoe_watch_refused{kind="Pod"} 1
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
	metricsdoc.Check(t, "../../docs/metrics.md", "watches", registry)
	now = now.Add(time.Minute)
	refusals.failed("*v1.Pod", forbidden())
	now = now.Add(time.Minute)
	if n := series(); n != 1 {
		t.Errorf("%d series with the last refusals 1 min (Pod) and 2 min (MoEDeployment) ago, want 1", n)
	}
	now = now.Add(time.Minute)
	if n := series(); n != 0 {
		t.Errorf("%d series 2 min after the last refusal, want none", n)
	}
}

// plainLists lists and watches like an API server without streaming lists (WatchList).
type plainLists struct{ *toolscache.ListWatch }

func (plainLists) IsWatchListSemanticsUnSupported() bool { return true }

// TestReflectorsComeAgain checks that a kind which is refused for an hour is reported all the time, because the
// reflector retries before the expiry. When the reflector is allowed to watch again, the report ends.
func TestReflectorsComeAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refusals := New(time.Now)
		var refused atomic.Bool
		lists := plainLists{&toolscache.ListWatch{
			ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
				if refused.Load() {
					return nil, forbidden()
				}
				return &corev1.PodList{}, nil
			},
			WatchFuncWithContext: func(ctx context.Context, _ metav1.ListOptions) (watch.Interface, error) {
				if refused.Load() {
					return nil, forbidden()
				}
				events := watch.NewFake()
				time.AfterFunc(time.Minute, events.Stop)
				return events, nil
			},
		}}
		informer := toolscache.NewSharedIndexInformer(lists, &corev1.Pod{}, 0, nil)
		// Handle is not used here, because it also logs, with the real clock.
		if err := informer.SetWatchErrorHandlerWithContext(func(_ context.Context, reflector *toolscache.Reflector, err error) {
			refusals.failed(reflector.TypeDescription(), err)
		}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { informer.RunWithContext(ctx); close(ended) }()
		refusedKinds := func() int { return testutil.CollectAndCount(refusals) }
		time.Sleep(10 * time.Minute)
		if n := refusedKinds(); n != 0 {
			t.Errorf("%d kinds are reported as refused before any refusal, want none", n)
		}
		refused.Store(true)
		time.Sleep(2 * time.Minute) // the watch that is open ends
		for minute := range 60 {
			if n := refusedKinds(); n != 1 {
				t.Errorf("minute %d: %d kinds are reported as refused, want 1", minute, n)
			}
			time.Sleep(time.Minute)
		}
		refused.Store(false)
		time.Sleep(time.Minute + expiry)
		if n := refusedKinds(); n != 0 {
			t.Errorf("%d kinds are reported as refused after watches succeed again, want none", n)
		}
		cancel()
		<-ended
	})
}
