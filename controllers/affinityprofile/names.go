// SPDX-License-Identifier: Apache-2.0

package affinityprofile

import (
	"fmt"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/ownership"
)

const (
	// manager is the field manager of all writes of this controller.
	manager = "semmoe-affinityprofile"
	// profileContainer is the container that sends the requests. The container semmoev1.EngineContainer computes them.
	profileContainer = "profile"
	// annotationFailure, on a profiling Job that this controller ended, is the reason. The Job is not retried.
	annotationFailure = "semmoe.io/failure"
	// annotationStopped, on a profiling Job that this controller ended because the deployment changed, is the reason.
	// The Job is retried.
	annotationStopped = "semmoe.io/stopped"
	// longestPrefix is the maximum length of the profile name in the name of a Job. Job names have at most 63
	// characters, and also contain "-inspect", a hash of 8 characters, and the attempt.
	longestPrefix = 40
)

// labelsOf returns the labels of the objects of one component of a profile.
func labelsOf(profile *semmoev1.AffinityProfile, component string, more ...string) map[string]string {
	return ownership.Labels(component, profile.Name, append(more, semmoev1.LabelProfile, profile.Name)...)
}

// inspectPrefix returns the prefix of the names of a profile's inspection Jobs. Long names are truncated and end in a
// hash.
func inspectPrefix(profile *semmoev1.AffinityProfile) string {
	name := profile.Name
	if len(name) > longestPrefix {
		name = name[:longestPrefix-9] + "-" + ownership.ShortHash(profile.Name, 8)
	}
	return name + "-inspect"
}

// jobName returns the name of the Job of an attempt. It depends only on the inputs, so that two profiles never run the
// same inputs concurrently.
func jobName(id string, attempt int) string { return fmt.Sprintf("profile-%s-%d", id, attempt) }
