package owned

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// managedByLabel has the value managedBy on every object that the operator has made.
const managedByLabel, managedBy = "app.kubernetes.io/managed-by", "semmoe-operator"

// Labels are those of every object of one component that belongs to an instance; more are further keys and values.
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

// Reference makes an object a child that is garbage-collected with its owner, of a kind of ours.
func Reference(owner metav1.Object, kind string) *metav1ac.OwnerReferenceApplyConfiguration {
	return metav1ac.OwnerReference().
		WithAPIVersion(semmoev1.GroupVersion.String()).
		WithKind(kind).
		WithName(owner.GetName()).
		WithUID(owner.GetUID()).
		WithController(true).
		WithBlockOwnerDeletion(true)
}

// ControllerReference is Reference as core types have it.
func ControllerReference(owner metav1.Object, kind string) []metav1.OwnerReference {
	return []metav1.OwnerReference{*metav1.NewControllerRef(owner, semmoev1.GroupVersion.WithKind(kind))}
}

// ShortHash is the first n hexadecimal digits of the sha256 of a value's JSON.
func ShortHash(value any, n int) string {
	data, err := json.Marshal(value)
	if err != nil {
		// API types always marshal: they came from JSON.
		panic(err)
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])[:n]
}
