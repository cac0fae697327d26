// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/tier"
)

// TestIgnoredRanks runs an engine that ignores the requested rank on one route. The engine serves, and a
// condition reports the route until an engine that obeys the rank is in service.
func TestIgnoredRanks(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Routing.SamplePercent = ptr.To[int32](100)
		m.Spec.Engine.Args = []string{"--fault", "ignore-rank:/generate"}
	})
	create(t, moed)
	eventually(t, waitTimeout, "the route is reported", func() error {
		current := get(t, moed)
		return conditionIs(current.Status.Conditions, current.Generation, semmoev1.ConditionDegraded, metav1.ConditionTrue, "RanksIgnored", "ignores the rank of requests on /generate", "Use an engine release")
	})
	waitCondition(t, moed, semmoev1.ConditionReady, metav1.ConditionTrue, "Serving")
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = nil })
	waitComplete(t, moed)
}
