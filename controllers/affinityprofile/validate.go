// SPDX-License-Identifier: Apache-2.0

package affinityprofile

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/podtemplate"
	"github.com/semmoe/operator/internal/model/family"
)

// invalidError is an error in the spec that only its author can fix. reason is the condition reason.
type invalidError struct{ reason, message string }

func (e *invalidError) Error() string { return e.message }

func invalidf(reason, format string, args ...any) *invalidError {
	return &invalidError{reason: reason, message: fmt.Sprintf(format, args...)}
}

// Validate returns an error in the spec of an AffinityProfile that the schema cannot detect, or nil.
func Validate(profile *semmoev1.AffinityProfile) error {
	if err := validate(profile); err != nil {
		return err
	}
	return nil // a plain nil, because a nil *invalidError in an error is not nil
}

// validate is Validate with a condition reason.
func validate(profile *semmoev1.AffinityProfile) *invalidError {
	adapter, err := registry.For(string(profile.Spec.Engine.Type))
	if err != nil {
		return invalidf("UnknownEngine", "spec.engine.type: %v", err)
	}
	if !adapter.ReportsRoutedExperts() && !usesTransformers(profile) {
		return invalidf("RoutedExpertsUnavailable", "spec.engine.type: %s does not return the experts of a request and cannot profile: use another engine, or backend Transformers with target Dedicated", adapter.Type)
	}
	if err := family.CheckLayout(profile.Spec.Model.LayoutAs); err != nil {
		return invalidf("InvalidSpec", "spec.model.layoutAs: %v", err)
	}
	if profile.Spec.Target == semmoev1.ProfilingTargetLive {
		return validateLive(profile)
	}
	// The start of the engine does not matter once there is a result: a later operator release that rejects more
	// options must not invalidate the result.
	if profile.Spec.Target == semmoev1.ProfilingTargetDedicated && !usesTransformers(profile) && profile.Status.Result == nil {
		situation := engine.Situation{Release: adapter.ImageRelease(profile.Spec.Engine.Image), Launch: launch(profile), UserArgs: profile.Spec.Engine.Args}
		ofTemplate := podtemplate.Env(profile.Spec.Template, semmoev1.EngineContainer)
		situation.UserEnv = engine.UserVariables(slices.Concat(profile.Spec.Engine.Env, ofTemplate))
		if err := adapter.ValidateOverlap(situation); err != nil {
			return invalidf("OverlapUnsupported", "%v", err)
		}
		if _, err := adapter.Args(launch(profile), profile.Spec.Engine.Args); err != nil {
			return invalidf("ContradictingFlags", "%v", err)
		}
		if err := adapter.ValidateOptions(launch(profile)); err != nil {
			return invalidf("ContradictingFlags", "%v", err)
		}
		if refusals := adapter.StartupSupport(situation).Refusals; len(refusals) > 0 {
			return invalidf(refusals[0].Reason, "%s", refusals[0].Message)
		}
	}
	if profile.Spec.Target == semmoev1.ProfilingTargetDedicated && profile.Status.Result == nil &&
		slices.ContainsFunc(profile.Spec.Engine.Env, func(env corev1.EnvVar) bool { return env.Name == podIPVariable }) {
		return invalidf("InvalidSpec", "spec.engine.env: %s is set by the operator: use another name", podIPVariable)
	}
	if profile.Status.Result != nil {
		return nil
	}
	if err := podtemplate.Check("spec.template", profile.Spec.Template, reserved()); err != nil {
		return invalidf("InvalidTemplate", "%v", err)
	}
	return nil
}

// usesTransformers reports whether the profiling Job computes the requests without the engine.
func usesTransformers(profile *semmoev1.AffinityProfile) bool {
	return profile.Spec.Backend == semmoev1.ProfilingBackendTransformers
}

// validateLive rejects fields that a profile with target Live does not use.
func validateLive(profile *semmoev1.AffinityProfile) *invalidError {
	if profile.Spec.Template != nil {
		return invalidf("InvalidSpec", "spec.template: a profile with target Live has no pods: remove the field")
	}
	return nil
}

// reserved returns the names that the operator reserves in the pods of profiling Jobs.
func reserved() podtemplate.Reserved {
	token := artifact.TokenVolume().Name
	return podtemplate.Reserved{
		Engine: semmoev1.EngineContainer, Managed: []string{profileContainer},
		Volumes: map[string]string{
			modelVolume: "the volume of spec.model.volume", temporaryVolume: "temporary files of the profile", semmoev1.DatasetVolume: "the data set",
			token: "a token for the artifact store",
		},
		Shared: []string{modelVolume}, Secret: token, Audience: artifact.Audience, Exposed: true, Variables: []string{podIPVariable},
	}
}
