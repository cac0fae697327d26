// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"cmp"
	"fmt"
	"path"
	"slices"

	corev1 "k8s.io/api/core/v1"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/podtemplate"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/family"
	"github.com/semmoe/operator/solver/placement"
)

// InvalidError is an error in the spec that only the user can fix. Reason becomes the reason of a condition.
type InvalidError struct{ Reason, Message string }

func (e *InvalidError) Error() string { return e.Message }

// Invalidf returns an error with a reason and a formatted message, which begins with the path of the field.
func Invalidf(reason, format string, args ...any) *InvalidError {
	return &InvalidError{Reason: reason, Message: fmt.Sprintf(format, args...)}
}

// Validate returns the first of Faults, or nil.
func Validate(moed *semmoev1.MoEDeployment) *InvalidError {
	if faults := Faults(moed); len(faults) > 0 {
		return faults[0]
	}
	return nil
}

// Faults returns the errors in a MoEDeployment that the schema cannot express. Each check reports its first finding.
func Faults(moed *semmoev1.MoEDeployment) []*InvalidError {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		return []*InvalidError{Invalidf("UnknownEngine", "spec.engine.type: %v", err)}
	}
	var faults []*InvalidError
	add := func(fault *InvalidError) {
		if fault != nil {
			faults = append(faults, fault)
		}
	}
	check := func(reason, prefix string, err error) {
		if err != nil {
			add(Invalidf(reason, "%s%v", prefix, err))
		}
	}
	launched := Launch(moed)
	check("InvalidSpec", "spec.model.layoutAs: ", family.CheckLayout(moed.Spec.Model.LayoutAs))
	add(validateRoutedExperts(moed, adapter))
	add(validateOverlap(moed, adapter, ""))
	_, err = adapter.Args(withOverlap(launched, moed, adapter), moed.Spec.Engine.Args)
	check("ContradictingFlags", "", err)
	check("ContradictingFlags", "", adapter.ValidateOptions(launched))
	check("InvalidPodsPerReplica", "", adapter.CheckNodes(launched))
	if desired.UsesPlans(moed) {
		check(engine.ReasonNoAllToAll, "", adapter.CheckExchange(launched))
	}
	check("InvalidSpec", "", launched.CheckKVEventPorts(moed.Spec.Engine.Port, probePort))
	add(validateEnv(moed, adapter, launched))
	if moed.Spec.Engine.Port == probePort {
		add(Invalidf("InvalidSpec", "spec.engine.port: %d is reserved for the operator's output probe: use another port", probePort))
	}
	if moed.Spec.Placement.Cache != nil && moed.Spec.Placement.Realization == semmoev1.RealizationEngineMap {
		add(Invalidf("InvalidSpec", "spec.placement.cache: with spec.placement.realization EngineMap nothing is copied: remove the cache, or use Auto or ReshuffledWeights"))
	}
	_, err = machines.BuiltIn(moed.Spec.Placement.Hardware)
	check("InvalidSpec", "spec.placement.hardware.", err)
	for _, path := range moed.Spec.Routing.PassThrough {
		check("InvalidSpec", "spec.routing.passThrough: ", registry.CheckPassThrough(path))
	}
	add(validateTemplates(moed))
	return faults
}

// givenEnv contains the user's variables of the engine's container in one field of the spec.
type givenEnv struct {
	field string
	env   []corev1.EnvVar
}

// envOf returns the variables in spec.engine.env, and those in the template, which is merged over them.
func envOf(moed *semmoev1.MoEDeployment) (engineEnv, templateEnv givenEnv) {
	return givenEnv{"spec.engine.env", moed.Spec.Engine.Env},
		givenEnv{fmt.Sprintf("spec.template.spec.containers: env of container %q", semmoev1.EngineContainer), podtemplate.Env(moed.Spec.Template, semmoev1.EngineContainer)}
}

// UserEnv returns all engine variables in the spec, as engine.UserVariables does.
func UserEnv(moed *semmoev1.MoEDeployment) []string {
	ofEngine, ofTemplate := envOf(moed)
	return engine.UserVariables(slices.Concat(ofEngine.env, ofTemplate.env))
}

// validateEnv rejects engine variables that users may not set.
func validateEnv(moed *semmoev1.MoEDeployment, adapter engine.Adapter, launched engine.Launch) *InvalidError {
	ofEngine, ofTemplate := envOf(moed)
	// A variable with the operator's own value changes nothing when merged.
	ofTemplate.env = slices.DeleteFunc(slices.Clone(ofTemplate.env), isPodIP)
	for _, given := range []givenEnv{ofEngine, ofTemplate} {
		for _, env := range given.env {
			switch {
			case desired.Shuffles(moed) && slices.Contains(tablesVariables, env.Name):
				return Invalidf("InvalidSpec", "%s: %s is set by the operator where spec.placement.tokenShuffle is Enabled: remove the variable", given.field, env.Name)
			case launched.Nodes > 1 && slices.Contains(groupVariables, env.Name):
				return Invalidf("InvalidSpec", "%s: %s is set by LeaderWorkerSet where spec.parallelism.podsPerReplica is above 1: use another name", given.field, env.Name)
			case env.Name == desired.PodIPVariable:
				return Invalidf("InvalidSpec", "%s: %s is set by the operator: use another name", given.field, env.Name)
			}
		}
	}
	if err := checkEnv(moed, adapter, launched); err != nil {
		return Invalidf("ContradictingFlags", "%v", err)
	}
	return nil
}

// checkEnv returns an error for variables that are incompatible with the launch.
func checkEnv(moed *semmoev1.MoEDeployment, adapter engine.Adapter, launched engine.Launch) error {
	ofEngine, ofTemplate := envOf(moed)
	return cmp.Or(adapter.CheckEnv(launched, ofEngine.field, engine.UserVariables(ofEngine.env)), adapter.CheckEnv(launched, ofTemplate.field, engine.UserVariables(ofTemplate.env)))
}

// isPodIP reports whether a variable is the operator's own, with its value.
func isPodIP(env corev1.EnvVar) bool {
	return env.Name == desired.PodIPVariable && env.ValueFrom != nil && env.ValueFrom.FieldRef != nil && env.ValueFrom.FieldRef.FieldPath == podIPEnv().ValueFrom.FieldRef.FieldPath
}

// validateOverlap rejects overlap settings that the engine has no flag for, or cannot apply to the model family. An
// empty family is unknown.
func validateOverlap(moed *semmoev1.MoEDeployment, adapter engine.Adapter, family string) *InvalidError {
	situation := situation(moed, adapter.ImageRelease(engineImage(moed)))
	situation.Launch = withOverlap(situation.Launch, moed, adapter)
	if situation.Family = family; moed.Spec.Engine.Overlap.Chosen() {
		situation.Family = "" // settings that the model excludes are not chosen
	}
	if err := adapter.ValidateOverlap(situation); err != nil {
		return Invalidf("OverlapUnsupported", "%v", err)
	}
	return nil
}

// withOverlap returns a launch with the overlap settings of the spec, or with mode Auto with each setting that needs the
// same support as all others.
func withOverlap(l engine.Launch, moed *semmoev1.MoEDeployment, adapter engine.Adapter) engine.Launch {
	if moed.Spec.Engine.Overlap.Chosen() {
		if l.Overlap.MicroBatches = 2; adapter.OverlapThresholds != nil {
			l.Overlap.DecodeThresholdTokens, l.Overlap.PrefillThresholdTokens = 1, 1
		}
	}
	return l
}

// situation returns the situation of an engine release without a plan and with an unknown model.
func situation(moed *semmoev1.MoEDeployment, release engine.Release) engine.Situation {
	return engine.Situation{Release: release, Launch: Launch(moed), UserArgs: moed.Spec.Engine.Args, UserEnv: UserEnv(moed)}
}

// ValidateRelease rejects settings that the engine release does not support, or with which it does not start.
func ValidateRelease(moed *semmoev1.MoEDeployment, release engine.Release) *InvalidError {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		return Invalidf("UnknownEngine", "spec.engine.type: %v", err)
	}
	if refusals := Starts(moed, release).Refusals; len(refusals) > 0 {
		return Invalidf(refusals[0].Reason, "%s", refusals[0].Message)
	}
	if err := adapter.ValidateOverlap(situation(moed, release)); err != nil {
		return Invalidf("OverlapUnsupported", "%v", err)
	}
	return nil
}

// Starts returns the settings that the engine release rejects at start or does not support, with or without a plan.
func Starts(moed *semmoev1.MoEDeployment, release engine.Release) engine.Support {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		return engine.Support{} // Validate reports an unknown engine
	}
	return adapter.StartupSupport(situation(moed, release))
}

// ValidateModel rejects settings that do not fit the inspected model. It reads only fields that status.model contains,
// because the webhook calls it too.
func ValidateModel(moed *semmoev1.MoEDeployment, report checkpoint.Report) *InvalidError {
	if err := report.CheckExpertParallelSize(int(moed.Spec.Parallelism.ExpertParallelSize)); err != nil {
		return Invalidf("InvalidExpertParallelSize", "spec.parallelism.expertParallelSize: %v", err)
	}
	ranks := int(moed.Spec.Parallelism.ExpertParallelSize)
	if err := placement.CheckSlots(placement.Auto, ranks, report.Experts, int(MinRedundantExperts(moed))/ranks); report.Experts > 0 && err != nil {
		return Invalidf("InvalidSpec", "spec.placement.redundantExperts: %s is invalid: %v", moed.Spec.Placement.RedundantExperts, err)
	}
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		return Invalidf("UnknownEngine", "spec.engine.type: %v", err)
	}
	return validateOverlap(moed, adapter, report.EngineFamily())
}

// MinRedundantExperts returns the number of redundant experts in the spec; with Auto, the smallest number above 0. An
// engine or a model that does not support copies rejects every number alike.
func MinRedundantExperts(moed *semmoev1.MoEDeployment) int32 {
	if moed.Spec.Placement.ChoosesRedundantExperts() {
		return moed.Spec.Parallelism.ExpertParallelSize
	}
	return moed.Spec.Placement.FixedRedundantExperts()
}

// ValidateGroups rejects replicas of several pods if the cluster lacks the kind LeaderWorkerSet.
func ValidateGroups(moed *semmoev1.MoEDeployment, known bool) *InvalidError {
	if pods := desired.PodsPerReplica(moed); pods > 1 && !known {
		return Invalidf(ReasonNoGroups, "spec.parallelism.podsPerReplica: %d needs the kind LeaderWorkerSet of %s, which the cluster lacks. Install LeaderWorkerSet, or use 1. The operator continues automatically after the installation",
			pods, leaderworkersetv1.GroupVersion)
	}
	return nil
}

// ourVolumes maps the names of the volumes that the operator adds to their content. ourInitContainers are the names of
// its init containers.
var (
	ourVolumes = map[string]string{
		modelVolume: "the volume of spec.model.volume", semmoev1.PlanVolume: "the plan's ConfigMap",
		semmoev1.EngineOptionsVolume: "the engine's options file", semmoev1.EngineTLSVolume: "the Secret of spec.engine.tls",
		semmoev1.CacheVolume: "the volume of spec.placement.cache", semmoev1.BaselineOutputsVolume: "the model's answers without a plan",
		semmoev1.TablesVolume: "the plan's tables, for an engine that shuffles tokens", semmoev1.TablesInUseVolume: "the ConfigMap with the tables in use", artifact.TokenVolume().Name: "a token for the artifact store",
	}
	ourInitContainers = []string{verifyContainer, fetchContainer, followContainer, reshuffleContainer, holdContainer, probeContainer}
)

// validateRoutedExperts rejects settings that need the experts of requests if the engine cannot return them.
func validateRoutedExperts(moed *semmoev1.MoEDeployment, adapter engine.Adapter) *InvalidError {
	if adapter.ReportsRoutedExperts() {
		return nil
	}
	if percent := moed.Spec.Routing.SamplePercent; percent != nil && *percent > 0 {
		return Invalidf(desired.ReasonRoutedExpertsUnavailable, "spec.routing.samplePercent is %d: %s does not return the routed experts of requests: use 0, or remove it", *percent, adapter.Type)
	}
	if profiling := moed.Spec.Profiling; profiling != nil && profiling.Dataset != nil && profiling.Backend != semmoev1.ProfilingBackendTransformers {
		return Invalidf(desired.ReasonRoutedExpertsUnavailable, "spec.profiling.dataset: %s does not return the routed experts of requests, and cannot profile: set spec.profiling.backend to Transformers and spec.profiling.target to Dedicated, or reference in spec.profiling.profileRef an AffinityProfile of the same model from another engine", adapter.Type)
	}
	return nil
}

// validateTemplates rejects pod templates that would change the operator's containers, or expose their data.
func validateTemplates(moed *semmoev1.MoEDeployment) *InvalidError {
	if template := moed.Spec.Template; template != nil {
		if policy := template.Spec.RestartPolicy; policy != "" && policy != corev1.RestartPolicyAlways {
			return Invalidf("InvalidTemplate", "spec.template.spec.restartPolicy: %q is not possible for a serving pod: remove it, or use Always", policy)
		}
		if err := podtemplate.Check("spec.template", template, reservedIn(moed)); err != nil {
			return Invalidf("InvalidTemplate", "%v", err)
		}
	}
	if template := moed.Spec.Routing.Template; template != nil {
		if err := podtemplate.CheckMetadata("spec.routing.template.metadata", template.Metadata.Labels, template.Metadata.Annotations); err != nil {
			return Invalidf("InvalidTemplate", "%v", err)
		}
	}
	return nil
}

// reservedIn returns the names that the operator reserves in engine pods.
func reservedIn(moed *semmoev1.MoEDeployment) podtemplate.Reserved {
	return podtemplate.Reserved{
		Engine: semmoev1.EngineContainer, Containers: ourInitContainers, Volumes: ourVolumes, Shared: []string{modelVolume},
		Secret: artifact.TokenVolume().Name, Audience: artifact.Audience, Exposed: desired.Shuffles(moed),
		Mounts: []string{
			semmoev1.PlanMountPath, semmoev1.TablesMountPath, semmoev1.TablesInUseMountPath, semmoev1.CacheMountPath, semmoev1.BaselineOutputsMountPath, path.Dir(semmoev1.EngineOptionsPath),
			semmoev1.EngineTLSMountPath,
		},
	}
}
