// Package watchmetrics tells which kinds a manager is not let see. What it does not see it can neither act upon nor say so in a
// condition: a right to list or to watch that is revoked while it runs leaves everything as it was, in silence.
package watchmetrics

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	toolscache "k8s.io/client-go/tools/cache"
)

// forgotten is how long after its last refusal a kind counts as seen again: nothing tells of a success, and a reflector tries again
// at least every 60 s (its back-off ends at 30 s, and as much by chance).
const forgotten = 90 * time.Second

var refusedDesc = prometheus.NewDesc("semmoe_watch_refused", "1 for a kind that the API server does not let this manager list or watch any more; absent for others.",
	[]string{"kind"}, nil)

// Refusals remembers what the API server has refused the caches of a manager to list or to watch, and is a collector of it. It is
// safe for concurrent use.
type Refusals struct {
	now func() time.Time

	mu   sync.Mutex
	last map[string]time.Time // by kind
}

// New remembers nothing yet.
func New(now func() time.Time) *Refusals {
	return &Refusals{now: now, last: map[string]time.Time{}}
}

// Handle is for the caches' failures to list and to watch; it logs them as the caches do by themselves.
func (r *Refusals) Handle(ctx context.Context, reflector *toolscache.Reflector, err error) {
	r.failed(reflector.TypeDescription(), err)
	toolscache.DefaultWatchErrorHandler(ctx, reflector, err)
}

// failed remembers a failure for lack of a right; the others pass by themselves, or end the manager's lease.
func (r *Refusals) failed(description string, err error) {
	if !apierrors.IsForbidden(err) && !apierrors.IsUnauthorized(err) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last[kindOf(description)] = r.now()
}

// kindOf is the kind of a type as reflectors describe it: its Go type, such as *v1.Pod.
func kindOf(description string) string { return description[strings.LastIndex(description, ".")+1:] }

// Describe tells the metric.
func (r *Refusals) Describe(descriptions chan<- *prometheus.Desc) { descriptions <- refusedDesc }

// Collect tells what is refused now. Unlike the metrics of objects it is of each manager, since the one that waits has to see as much.
func (r *Refusals) Collect(metrics chan<- prometheus.Metric) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for kind, at := range r.last {
		if r.now().Sub(at) > forgotten {
			delete(r.last, kind)
			continue
		}
		metrics <- prometheus.MustNewConstMetric(refusedDesc, prometheus.GaugeValue, 1, kind)
	}
}
