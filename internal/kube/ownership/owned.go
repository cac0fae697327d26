// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// managedByLabel has the value managedBy on every object that the operator created.
const managedByLabel, managedBy = "app.kubernetes.io/managed-by", "semmoe-operator"

// Labels returns the labels of every object of one component of an instance; more contains additional keys and values.
func Labels(component, instance string, more ...string) map[string]string {
	all := map[string]string{
		semmoev1.LabelComponent:       component,
		"app.kubernetes.io/name":      "semmoe",
		"app.kubernetes.io/instance":  instance,
		"app.kubernetes.io/component": component,
		managedByLabel:                managedBy,
	}
	for i := 0; i+1 < len(more); i += 2 {
		all[more[i]] = more[i+1]
	}
	return all
}

// PassQueue copies the labels of Kueue from the labels of an owner to those of an object, and returns the latter.
func PassQueue(to, owner map[string]string) map[string]string {
	for _, label := range []string{semmoev1.LabelQueue, semmoev1.LabelQueuePriority} {
		if value := owner[label]; value != "" {
			to[label] = value
		}
	}
	return to
}

// OperatorLabels returns the labels of every object of the operator.
func OperatorLabels() map[string]string {
	return map[string]string{managedByLabel: managedBy}
}

// IsOperatorManaged reports whether the operator created an object.
func IsOperatorManaged(object metav1.Object) bool {
	return object.GetLabels()[managedByLabel] == managedBy
}

// Reference returns an owner reference that garbage-collects the object with its owner, of kind kind.
func Reference(owner metav1.Object, kind string) *metav1ac.OwnerReferenceApplyConfiguration {
	return metav1ac.OwnerReference().
		WithAPIVersion(semmoev1.GroupVersion.String()).
		WithKind(kind).
		WithName(owner.GetName()).
		WithUID(owner.GetUID()).
		WithController(true).
		WithBlockOwnerDeletion(true)
}

// ControllerReference is Reference in the form of core types.
func ControllerReference(owner metav1.Object, kind string) []metav1.OwnerReference {
	return []metav1.OwnerReference{*metav1.NewControllerRef(owner, semmoev1.GroupVersion.WithKind(kind))}
}

// ShortHash returns the first n hexadecimal digits of the sha256 of a value's JSON.
func ShortHash(value any, n int) string {
	data, err := json.Marshal(value)
	if err != nil {
		// API types always marshal: they were decoded from JSON.
		panic(err)
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])[:n]
}
