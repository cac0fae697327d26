// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/writes"
)

// CreateWorkload creates the workload of a revision. It fails if the spec or one of the plans has changed since it
// was read: caches of kinds are not synchronized, so a candidate that failed can disappear from the cache before the
// record of its failure on the plan appears, and would be tried again.
type CreateWorkload struct {
	Workload *Workload
	// Plans are the plans with the layout of the workload.
	Plans []*semmoev1.PlacementPlan
	// Event is recorded once the workload is created; nil for none.
	Event *writes.Event
}

// ChangeWorkload changes annotations or the replicas of an existing workload. It fails if the workload has changed since
// it was read.
type ChangeWorkload struct {
	Workload *Workload
	// Annotations are set; an empty value removes the annotation.
	Annotations map[string]string
	// Replicas is the new number of replicas; nil keeps it.
	Replicas *int32
	// Event is recorded once the workload is changed; nil for none.
	Event *writes.Event
}

// Apply makes the change in the object.
func (c ChangeWorkload) Apply() {
	for name, value := range c.Annotations {
		if value == "" {
			delete(c.Workload.Annotations, name)
		} else {
			metav1.SetMetaDataAnnotation(c.Workload.ObjectMeta, name, value)
		}
	}
	if c.Replicas != nil {
		*c.Workload.Replicas() = *c.Replicas
	}
}

// KeepPlan makes a workload an additional owner of the plan's ConfigMap that its pods mount, so that pods created after
// the deletion of the plan still find it.
type KeepPlan struct{ Workload *Workload }
