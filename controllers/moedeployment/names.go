package moedeployment

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"

	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// manager is the field manager of everything that this controller writes.
const manager = "semmoe-moedeployment"

func podsServiceName(moed *semmoev1.MoEDeployment) string { return moed.Name + "-pods" }
func routerName(moed *semmoev1.MoEDeployment) string      { return moed.Name + "-router" }

// selector selects the pods of one component of a MoEDeployment.
func selector(moed *semmoev1.MoEDeployment, component string) map[string]string {
	return map[string]string{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: component}
}

// labelsOf are those of every object of one component.
func labelsOf(moed *semmoev1.MoEDeployment, component string, more ...string) map[string]string {
	all := selector(moed, component)
	maps.Copy(all, map[string]string{
		"app.kubernetes.io/name":       "semmoe",
		"app.kubernetes.io/instance":   moed.Name,
		"app.kubernetes.io/component":  component,
		"app.kubernetes.io/managed-by": "semmoe-operator",
	})
	for i := 0; i+1 < len(more); i += 2 {
		all[more[i]] = more[i+1]
	}
	return all
}

// ownerReference makes the object a child that is garbage-collected with the MoEDeployment.
func ownerReference(moed *semmoev1.MoEDeployment) *metav1ac.OwnerReferenceApplyConfiguration {
	return metav1ac.OwnerReference().
		WithAPIVersion(semmoev1.GroupVersion.String()).
		WithKind("MoEDeployment").
		WithName(moed.Name).
		WithUID(moed.UID).
		WithController(true).
		WithBlockOwnerDeletion(true)
}

// shortHash is the first n hex digits of the sha256 of a value's JSON.
func shortHash(value any, n int) string {
	data, err := json.Marshal(value)
	if err != nil {
		// API types always marshal: they came from JSON.
		panic(err)
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])[:n]
}
