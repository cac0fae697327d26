package affinityprofile

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
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
		return invalidf("EngineCannotTell", "spec.engine.type: %s does not tell the experts of a request, and cannot profile: use another engine", adapter.Type)
	}
	if profile.Spec.Target == semmoev1.ProfilingTargetLive {
		return validateLive(profile)
	}
	// What the engine was started with counts no more once there is a result: a release that refuses more must not take it back.
	if profile.Spec.Target == semmoev1.ProfilingTargetDedicated && profile.Status.Result == nil {
		situation := engine.Situation{Launch: launch(profile), UserArgs: profile.Spec.Engine.Args}
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
		if slices.ContainsFunc(profile.Spec.Engine.Env, func(env corev1.EnvVar) bool { return env.Name == podIPVariable }) {
			return invalidf("InvalidSpec", "spec.engine.env: %s is set by the operator: use another name", podIPVariable)
		}
	}
	if template := profile.Spec.Template; template != nil {
		return validateTemplate(template)
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

func validateTemplate(template *corev1.PodTemplateSpec) *invalidError {
	for _, metadata := range []struct {
		field string
		keys  map[string]string
	}{{"labels", template.Labels}, {"annotations", template.Annotations}} {
		for key := range metadata.keys {
			if strings.HasPrefix(key, semmoev1.GroupVersion.Group+"/") {
				return invalidf("InvalidTemplate", "spec.template.metadata.%s: %q is reserved: keys under %s/ are the operator's", metadata.field, key, semmoev1.GroupVersion.Group)
			}
		}
	}
	for _, volume := range template.Spec.Volumes {
		if slices.Contains(ownVolumes, volume.Name) {
			return invalidf("InvalidTemplate", "spec.template.spec.volumes: %q is one of the operator's (%s): use another name", volume.Name, strings.Join(ownVolumes, ", "))
		}
	}
	for _, container := range template.Spec.Containers {
		if container.Name != semmoev1.EngineContainer && container.Name != profileContainer {
			if container.Image == "" {
				return invalidf("InvalidTemplate", "spec.template.spec.containers: container %q has no image; the operator's containers are %q and %q", container.Name, semmoev1.EngineContainer, profileContainer)
			}
			continue
		}
		if container.Image != "" || container.Command != nil || container.Args != nil {
			return invalidf("InvalidTemplate", "spec.template.spec.containers: image, command and args of container %q are not the template's: use spec.engine for the engine's", container.Name)
		}
	}
	return nil
}
