// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"strings"
	"testing"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

func TestUnknownHardwareIsRefused(t *testing.T) {
	err := Validate(moedtest.Deployment(moedtest.OnHardware(&semmoev1.HardwareReference{BuiltIn: "abacus"})))
	if err == nil || !strings.Contains(err.Error(), `spec.placement.hardware.builtIn: there is no built-in hardware profile "abacus"; there are h200-nvlink`) {
		t.Errorf("error %v", err)
	}
}
