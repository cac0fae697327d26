// SPDX-License-Identifier: Apache-2.0

package front

import (
	"slices"
	"testing"

	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

// Requests are routed within the token load limit for which the placement was solved and scored.
func TestRouterKeepsTheTokenLoadLimit(t *testing.T) {
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Placement.TokenLoadLimitPercent = ptr.To[int32](125) })
	if args := routerArgs(moed); !slices.Contains(args, "--cap=1.25") {
		t.Errorf("arguments %v", args)
	}
}
