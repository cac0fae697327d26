// SPDX-License-Identifier: Apache-2.0

// Package storewatch checks whether the artifact store is available to the leading manager.
//
// Invariant: a failure is reported after it has lasted for patience, and its text does not change while it lasts.
package storewatch

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/kube/podhealth"
)

const (
	// period is the time between two checks.
	period = 10 * time.Second
	// checkTimeout bounds a check.
	checkTimeout = 10 * time.Second
	// patience is the time for which the store may be unavailable before objects report it. A restart of the store takes
	// less.
	patience = 20 * time.Second
)

// unused is a scope without artifacts. A read of it costs the store one lookup, and requires the same rights as any
// scope.
var unused = artifact.Scope{Namespace: "default", Kind: artifact.Profile, ID: "00000000"}

var availableDesc = prometheus.NewDesc("semmoe_store_available", "1 if the artifact store answers the leading manager, 0 if not; absent without a store.", nil, nil)

// Watch checks the store, on the leader only. It is a collector of the result, and safe for concurrent use.
type Watch struct {
	// Changed receives an event when Failure begins or ceases to report a failure.
	Changed chan event.GenericEvent

	store *access.Access
	now   func() time.Time

	mu sync.Mutex
	// checked is false before the first check, and where no store is configured.
	checked bool
	// since is the time of the first failed check, zero while checks succeed. cause is the error of that check.
	since time.Time
	cause string
	// reported is whether the failure has lasted for patience.
	reported bool
}

// New returns a Watch of a store. store is nil if no store is configured.
func New(store *access.Access, now func() time.Time) *Watch {
	return &Watch{Changed: make(chan event.GenericEvent), store: store, now: now}
}

// NeedLeaderElection is true: other managers do not use the store.
func (w *Watch) NeedLeaderElection() bool { return true }

// Start checks the store periodically until the context ends.
func (w *Watch) Start(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx).WithName("store")
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for {
		if changed, err := w.check(ctx); changed {
			log.Info("Availability of the artifact store changed", "available", err == nil, "cause", err)
			select {
			case w.Changed <- event.GenericEvent{Object: client.Object(&semmoev1.MoEDeployment{})}:
			case <-ctx.Done():
			}
		}
		select {
		case <-ctx.Done():
			w.reset()
			return nil
		case <-ticker.C:
		}
	}
}

// Failure returns the error of the store. It returns an empty string while the store is available, before it has been
// unavailable for patience, and without a store.
func (w *Watch) Failure() string {
	if w == nil {
		return ""
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.reported {
		return ""
	}
	return w.cause
}

// check reads from the store, and returns whether the result of Failure changed between a failure and none.
func (w *Watch) check(ctx context.Context) (bool, error) {
	checkCtx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	err := w.ask(checkCtx)
	if errors.Is(err, access.ErrNoStore) || ctx.Err() != nil {
		return false, err
	}
	return w.record(err), err
}

func (w *Watch) ask(ctx context.Context) error {
	store, err := w.store.Client(ctx)
	if err != nil {
		return err
	}
	if _, err = store.Published(ctx, unused); errors.Is(err, artifact.ErrNotFound) {
		return nil
	}
	return err
}

// record stores the result of a check, and returns whether the result of Failure changed between a failure and none.
func (w *Watch) record(err error) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.checked = true
	was := w.reported
	switch now := w.now(); {
	case err == nil:
		w.since, w.cause, w.reported = time.Time{}, "", false
	case w.since.IsZero():
		w.since, w.cause = now, podhealth.LastLine(err.Error())
	default:
		w.reported = w.reported || now.Sub(w.since) >= patience
	}
	return w.reported != was
}

// reset discards the result, because a manager that does not lead reports nothing.
func (w *Watch) reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.checked, w.since, w.cause, w.reported = false, time.Time{}, "", false
}

// Describe implements prometheus.Collector.
func (w *Watch) Describe(descriptions chan<- *prometheus.Desc) { descriptions <- availableDesc }

// Collect sends the result of the last check, and nothing before the first one.
func (w *Watch) Collect(metrics chan<- prometheus.Metric) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.checked {
		return
	}
	available := 1.0
	if !w.since.IsZero() {
		available = 0
	}
	metrics <- prometheus.MustNewConstMetric(availableDesc, prometheus.GaugeValue, available)
}
