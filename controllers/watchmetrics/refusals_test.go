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
		t.Errorf("%d series of failures that pass by themselves", n)
	}
	refusals.failed("*v1.Pod", forbidden())
	refusals.failed("*v1alpha1.MoEDeployment", apierrors.NewUnauthorized("who are you"))
	want := `
# HELP semmoe_watch_refused 1 for a kind that the API server does not let this manager list or watch any more; absent for others.
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
		t.Errorf("%d series a minute after the last refusal of one kind, and two after that of the other", n)
	}
	now = now.Add(time.Minute)
	if n := series(); n != 0 {
		t.Errorf("%d series two minutes after the last refusal", n)
	}
}

// plainLists are lists and watches of an API server that sends no list within a watch.
type plainLists struct{ *toolscache.ListWatch }

func (plainLists) IsWatchListSemanticsUnSupported() bool { return true }

// A reflector that is refused for an hour is told all the time: it comes again before it is forgotten. Once it is let in again, it is
// forgotten.
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
		// Handle logs as well, by a log that goes by the clock of this machine.
		if err := informer.SetWatchErrorHandlerWithContext(func(_ context.Context, reflector *toolscache.Reflector, err error) {
			refusals.failed(reflector.TypeDescription(), err)
		}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { informer.RunWithContext(ctx); close(ended) }()
		told := func() int { return testutil.CollectAndCount(refusals) }
		time.Sleep(10 * time.Minute)
		if n := told(); n != 0 {
			t.Errorf("%d kinds are refused where none is", n)
		}
		refused.Store(true)
		time.Sleep(2 * time.Minute) // the watch that is open ends
		for minute := range 60 {
			if n := told(); n != 1 {
				t.Errorf("minute %d: %d kinds are refused", minute, n)
			}
			time.Sleep(time.Minute)
		}
		refused.Store(false)
		time.Sleep(time.Minute + forgotten)
		if n := told(); n != 0 {
			t.Errorf("%d kinds are refused after all are let in again", n)
		}
		cancel()
		<-ended
	})
}
