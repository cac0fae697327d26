// SPDX-License-Identifier: Apache-2.0

// Package watchmetrics exports the kinds that a manager is not allowed to list or watch (RBAC). If such a right is
// revoked while the manager runs, its cache keeps the last objects: the manager neither acts on changes nor reports a
// condition. The metric is the only sign.
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

// expiry is the time after the last refusal at which a kind no longer counts as refused. No callback reports a success,
// and a reflector retries at least every 60 s (its back-off is at most 30 s, plus as much jitter).
const expiry = 90 * time.Second

var refusedDesc = prometheus.NewDesc("semmoe_watch_refused", "1 for a kind that this manager is no longer allowed to list or watch; absent for other kinds.",
	[]string{"kind"}, nil)

// Refusals records the kinds that the API server refused to the caches of a manager, and exports them as a metric. It
// is safe for concurrent use.
type Refusals struct {
	now func() time.Time

	mu   sync.Mutex
	last map[string]time.Time // by kind
}

// New returns Refusals without a refusal. now returns the current time.
func New(now func() time.Time) *Refusals {
	return &Refusals{now: now, last: map[string]time.Time{}}
}

// Handle is a watch error handler of the caches. It records refusals, and logs errors like the default handler.
func (r *Refusals) Handle(ctx context.Context, reflector *toolscache.Reflector, err error) {
	r.failed(reflector.TypeDescription(), err)
	toolscache.DefaultWatchErrorHandler(ctx, reflector, err)
}

// failed records an error for lack of a right. Other errors are ignored: they are transient, or they also end the lease
// of the manager.
func (r *Refusals) failed(description string, err error) {
	if !apierrors.IsForbidden(err) && !apierrors.IsUnauthorized(err) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last[kindOf(description)] = r.now()
}

// kindOf returns the kind of a type. Reflectors describe a type by its Go type, such as *v1.Pod.
func kindOf(description string) string { return description[strings.LastIndex(description, ".")+1:] }

// Describe implements prometheus.Collector.
func (r *Refusals) Describe(descriptions chan<- *prometheus.Desc) { descriptions <- refusedDesc }

// Collect sends a series for each refused kind. Unlike the metrics of objects, every manager exports it, because a
// standby manager needs the same rights as the leader.
func (r *Refusals) Collect(metrics chan<- prometheus.Metric) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for kind, at := range r.last {
		if r.now().Sub(at) > expiry {
			delete(r.last, kind)
			continue
		}
		metrics <- prometheus.MustNewConstMetric(refusedDesc, prometheus.GaugeValue, 1, kind)
	}
}
