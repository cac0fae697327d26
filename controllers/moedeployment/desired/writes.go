// SPDX-License-Identifier: Apache-2.0

package desired

import (
	coreac "k8s.io/client-go/applyconfigurations/core/v1"

	"github.com/semmoe/operator/internal/kube/writes"
)

// ApplyConfigMap applies a ConfigMap if it differs.
type ApplyConfigMap struct {
	Intent *coreac.ConfigMapApplyConfiguration
	// Event is recorded once the ConfigMap is applied; nil for none.
	Event *writes.Event
}
