// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/tier"
)

var heldMetric = regexp.MustCompile(`(?m)^semmoe_router_held_requests_total (\S+)$`)

// heldRequests returns the number of requests that waited in the routers of a deployment.
func heldRequests(t *testing.T, moed *semmoev1.MoEDeployment) (n float64) {
	t.Helper()
	for _, text := range metricsOf(t, moed.Namespace, client.MatchingLabels{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: semmoev1.ComponentRouter}, 9090) {
		line := heldMetric.FindStringSubmatch(text)
		if line == nil {
			t.Fatal("a router has no metric semmoe_router_held_requests_total")
		}
		count, err := strconv.ParseFloat(line[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		n += count
	}
	return n
}

// TestWaitQueue lets requests wait for the rank of their experts. All are answered, and some wait when
// many requests need the same rank. After waiting is disabled, no request waits.
func TestWaitQueue(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	storedProfile(t, namespace)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Replicas, m.Spec.Routing.Replicas = ptr.To[int32](2), 1
		m.Spec.Routing.HoldMilliseconds = ptr.To[int32](1000)
		m.Spec.Placement.TokenLoadLimitPercent = ptr.To[int32](103) // the cap is reached with four ranks too
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "tiny"}}
	})
	create(t, moed)
	plan := waitPlanned(t, moed).Status.PlanDigest
	url := serviceURL(t, moed)
	byPlan := func() error { return sentBy(t.Context(), url, plan) }
	eventually(t, waitTimeout, "requests are routed by the plan", byPlan)
	kinds := []string{"func main() { return nil }\n", "SELECT name FROM users WHERE id = 1; ", "Il était une fois une petite fille. ", "The old man went to the sea. ", "日本の夏はとても暑いです。", "def f(x):\n    return x\n"}
	crowd := func() {
		var clients sync.WaitGroup
		for client := range uint64(16) {
			clients.Go(func() {
				random := rand.New(rand.NewPCG(client, 1))
				for range 20 {
					prompt := strings.Repeat(kinds[random.IntN(len(kinds))], 1+random.IntN(8))
					response, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"model": "tiny", "prompt": %q, "max_tokens": 2}`, prompt)))
					if err == nil {
						err = answered(response, nil)
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		clients.Wait()
	}
	crowd()
	waited := heldRequests(t, moed)
	t.Logf("%v of 320 requests waited", waited)
	if waited == 0 || waited > 320 {
		t.Errorf("%v of 320 requests waited, want 1 to 320", waited)
	}

	before := podNames(t, moed, semmoev1.ComponentRouter)
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Routing.HoldMilliseconds = nil })
	eventually(t, waitTimeout, "another router is running", func() error {
		if names := podNames(t, moed, semmoev1.ComponentRouter); len(names) != 1 || names[0] == before[0] {
			return fmt.Errorf("the routers are %v", names)
		}
		return byPlan()
	})
	waitComplete(t, moed)
	if crowd(); heldRequests(t, moed) != 0 {
		t.Errorf("%v requests waited although waiting is disabled", heldRequests(t, moed))
	}
}
