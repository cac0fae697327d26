package affinityprofile

import (
	"fmt"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/owned"
)

const (
	// manager is the field manager of everything that this controller writes.
	manager = "semmoe-affinityprofile"
	// profileContainer sends the requests; semmoev1.EngineContainer answers them.
	profileContainer = "profile"
	// annotationFailure is, on a profiling Job that this controller has ended, why.
	annotationFailure = "semmoe.io/failure"
	// annotationStopped is, on one that it has ended since the deployment came to answer otherwise, why: it is tried again.
	annotationStopped = "semmoe.io/stopped"
	// longestPrefix leaves room, within the 63 characters that the name of a Job can have, for "-inspect", a hash of 8
	// and the attempt.
	longestPrefix = 40
)

// labelsOf are those of every object of one component of a profile.
func labelsOf(profile *semmoev1.AffinityProfile, component string, more ...string) map[string]string {
	return owned.Labels(component, profile.Name, append(more, semmoev1.LabelProfile, profile.Name)...)
}

// inspectPrefix begins the names of a profile's inspection Jobs; long names end in a hash of the whole.
func inspectPrefix(profile *semmoev1.AffinityProfile) string {
	name := profile.Name
	if len(name) > longestPrefix {
		name = name[:longestPrefix-9] + "-" + owned.ShortHash(profile.Name, 8)
	}
	return name + "-inspect"
}

// jobName is the name of an attempt: it belongs to the inputs, so that two profiles never try the same at once.
func jobName(id string, attempt int) string { return fmt.Sprintf("profile-%s-%d", id, attempt) }
