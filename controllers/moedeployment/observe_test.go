// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/storewatch"
	"github.com/semmoe/operator/internal/artifact/access"
)

// TestObservesTheStore checks that a MoEDeployment with plans observes that the artifact store is away, and one without
// plans does not.
func TestObservesTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := moedtest.Cluster(t)
		// The certificate of the store does not exist.
		store := &access.Access{URL: "https://semmoe-store", CA: types.NamespacedName{Namespace: "system", Name: "semmoe-store-ca"}, Reader: c}
		watch := storewatch.New(store, time.Now)
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go watch.Start(ctx) //nolint:errcheck // it returns no error
		<-watch.Changed
		r := &Reconciler{Client: c, Live: c, Now: time.Now, Store: store, StoreWatch: watch}
		for want, profiling := range map[string]*semmoev1.ProfilingSpec{"CA certificate": {Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}}, "": nil} {
			moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Profiling = profiling })
			observed, err := r.observe(ctx, moed)
			if err != nil {
				t.Fatal(err)
			}
			if got := observed.StoreFailure; (got == "") != (want == "") || !strings.Contains(got, want) {
				t.Errorf("profiling %v: failure %q, want %q", profiling, got, want)
			}
		}
	})
}
