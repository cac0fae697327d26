package affinityprofile

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/overlay"
)

// invalidError is a fault of the spec that only its author can mend; reason becomes a condition's.
type invalidError struct{ reason, message string }

func (e *invalidError) Error() string { return e.message }

func invalidf(reason, format string, args ...any) *invalidError {
	return &invalidError{reason: reason, message: fmt.Sprintf(format, args...)}
}

// Validate tells what is wrong with an AffinityProfile that the schema cannot tell; nil for nothing.
func Validate(profile *semmoev1.AffinityProfile) error {
	if err := validate(profile); err != nil {
		return err
	}
	return nil // not the nil *invalidError
}

// validate is Validate, with the reason for a condition.
func validate(profile *semmoev1.AffinityProfile) *invalidError {
	adapter, err := registry.For(string(profile.Spec.Engine.Type))
	if err != nil {
		return invalidf("UnknownEngine", "spec.engine.type: %v", err)
	}
	if !adapter.TellsExperts() {
		return invalidf("RoutedExpertsUnavailable", "spec.engine.type: %s does not return the routed experts of requests, and cannot profile: use another engine", adapter.Type)
	}
	if profile.Spec.Target == semmoev1.ProfilingTargetLive {
		return validateLive(profile)
	}
	// What the engine was started with counts no more once there is a result: a release that refuses more must not take it back.
	if profile.Spec.Target == semmoev1.ProfilingTargetDedicated && profile.Status.Result == nil {
		situation := engine.Situation{Release: adapter.ImageRelease(profile.Spec.Engine.Image), Launch: launch(profile), UserArgs: profile.Spec.Engine.Args}
		ofTemplate := overlay.Env(profile.Spec.Template, semmoev1.EngineContainer)
		for _, variable := range slices.Concat(profile.Spec.Engine.Env, ofTemplate) {
			situation.UserEnv = append(situation.UserEnv, variable.Name)
		}
		if err := adapter.Overlaps(situation); err != nil {
			return invalidf("OverlapUnsupported", "%v", err)
		}
		if _, err := adapter.Args(launch(profile), profile.Spec.Engine.Args); err != nil {
			return invalidf("ContradictingFlags", "%v", err)
		}
		if err := adapter.ValidateOptions(launch(profile)); err != nil {
			return invalidf("ContradictingFlags", "%v", err)
		}
		if refusals := adapter.Starts(situation).Refusals; len(refusals) > 0 {
			return invalidf(refusals[0].Reason, "%s", refusals[0].Message)
		}
		if slices.ContainsFunc(profile.Spec.Engine.Env, func(env corev1.EnvVar) bool { return env.Name == podIPVariable }) {
			return invalidf("InvalidSpec", "spec.engine.env: %s is set by the operator: use another name", podIPVariable)
		}
	}
	if profile.Status.Result != nil {
		return nil
	}
	if err := overlay.Check("spec.template", profile.Spec.Template, reserved()); err != nil {
		return invalidf("InvalidTemplate", "%v", err)
	}
	return nil
}

// validateLive refuses what a profile of target Live has no use for.
func validateLive(profile *semmoev1.AffinityProfile) *invalidError {
	if profile.Spec.Template != nil {
		return invalidf("InvalidSpec", "spec.template: a profile of target Live has no pods: remove it")
	}
	return nil
}

// reserved is what the operator reserves in the pods of profiling Jobs.
func reserved() overlay.Reserved {
	token := access.TokenVolume().Name
	return overlay.Reserved{
		Engine: semmoev1.EngineContainer, Managed: []string{profileContainer},
		Volumes: map[string]string{
			modelVolume: "the volume of spec.model.volume", temporaryVolume: "temporary files of the profile", semmoev1.DatasetVolume: "the data set",
			token: "a token for the artifact store",
		},
		Shared: []string{modelVolume}, Secret: token, Audience: artifact.Audience, Exposed: true, Variables: []string{podIPVariable},
	}
}
