// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/audit"
	"github.com/semmoe/operator/test/faults"
	"github.com/semmoe/operator/test/tier"
)

// refusedKinds returns the kinds that the manager may not watch, according to its metrics.
func refusedKinds() ([]string, error) {
	families, err := metrics.Registry.Gather()
	var kinds []string
	for _, family := range families {
		if family.GetName() != "semmoe_watch_refused" {
			continue
		}
		for _, series := range family.Metric {
			kinds = append(kinds, series.Label[0].GetValue())
		}
	}
	return kinds, err
}

// TestWatchRightsRevoked revokes the manager's right to watch workloads. The manager cannot report this in a condition, so
// its metrics name the kind within a minute of the end of the open watch. The serving pods keep serving, and changes
// made in this time are applied once the right is restored.
//
// This test is not parallel because the managers of a process share their metrics.
func TestWatchRightsRevoked(t *testing.T) {
	tier.Nightly(t)
	namespace := newNamespace(t)
	granted := grantRights(t, namespace)
	injector := faults.New(faults.Schedule{})
	startManagerAs(t, granted.config(), image, namespace, injector)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](2) })
	create(t, moed)
	since, err := readySince(waitComplete(t, moed))
	if err != nil {
		t.Fatal(err)
	}
	kindsRefused := func(want ...string) func() error {
		return func() error {
			kinds, err := refusedKinds()
			if diff := cmp.Diff(want, kinds); diff != "" || err != nil {
				return fmt.Errorf("refused kinds (-want +got): %s, %v", diff, err)
			}
			return nil
		}
	}
	if err := kindsRefused()(); err != nil {
		t.Error(err)
	}
	pods := podUIDs(t, moed)
	asking := startTraffic(t, serviceURL(t, moed))

	restore := granted.revoke(t, audit.Without(granted.role.Rules, "statefulsets"))
	injector.InterruptWatches() // ends the open watches
	injector.ResumeWatches()
	ended := time.Now()
	eventually(t, time.Minute, "the refusal is reported", kindsRefused("StatefulSet"))
	refused := time.Since(ended)
	served := asking.end(t)
	if diff := cmp.Diff(pods, podUIDs(t, moed)); diff != "" {
		t.Errorf("pods were replaced (-before +after):\n%s", diff)
	}
	restore()
	back := time.Now()
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](1) })
	if again, err := readySince(waitComplete(t, moed)); err != nil || again != since {
		t.Errorf("the deployment is ready since %v, was since %v, %v", again, since, err)
	}
	acted := time.Since(back)
	eventually(t, 3*time.Minute, "nothing is refused", kindsRefused())
	t.Logf("the missing watch right is reported %.1f s after the watch ends, %d requests answered in this time; after the right is restored a change is in service in %.1f s, and the report ends after %.1f s; %v",
		refused.Seconds(), served, acted.Seconds(), time.Since(back).Seconds(), injector)
	clearNamespace(t, namespace)
}
