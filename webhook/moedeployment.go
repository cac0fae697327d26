package webhook

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/affinityprofile"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/promquery"
)

// moeDeployments are the rules of MoEDeployments.
type moeDeployments struct {
	client.Reader
	// hosts are the Prometheus servers that objects of every namespace may name.
	hosts promquery.Hosts
}

func (m *moeDeployments) refuse(ctx context.Context, moed *semmoev1.MoEDeployment) []error {
	var faults []error
	for _, fault := range revisions.Faults(moed) {
		faults = append(faults, fault)
	}
	if _, err := registry.For(string(moed.Spec.Engine.Type)); err != nil {
		return faults // nothing else is known of such an engine
	}
	if err := revisions.ValidateRelease(moed, revisions.Release(moed, nil)); err != nil {
		faults = append(faults, err)
	}
	for _, err := range []error{refuseModel(moed), refuseRealization(moed), refuseProfile(moed), m.refuseName(ctx, moed), m.refusePin(ctx, moed)} {
		if err != nil {
			faults = append(faults, err)
		}
	}
	return faults
}

// refuseModel refuses a spec that the model rules out, as the controller does once it has inspected the model. An object that is created has
// no status.
func refuseModel(moed *semmoev1.MoEDeployment) error {
	if moed.Status.Model == nil {
		return nil
	}
	if err := revisions.ValidateModel(moed, foundIn(moed)); err != nil {
		return err
	}
	return nil // not the nil *InvalidError
}

// foundIn is what the status contains of the model; the zero value, which rules nothing out, before the model is inspected.
func foundIn(moed *semmoev1.MoEDeployment) checkpoint.Report {
	model := moed.Status.Model
	if model == nil {
		return checkpoint.Report{}
	}
	return checkpoint.Report{Family: model.Family, Experts: int(model.Experts), ExpertsPerToken: int(model.ExpertsPerToken)}
}

// replacing leaves the model in the status only where it is the model of the spec: in an update the status is that of the stored object,
// whose checkpoint may be another one.
func (m *moeDeployments) replacing(stored, moed *semmoev1.MoEDeployment) *semmoev1.MoEDeployment {
	if stored.Status.ObservedGeneration == stored.Generation && equality.Semantic.DeepEqual(stored.Spec.Model, moed.Spec.Model) {
		return moed
	}
	moed = moed.DeepCopy()
	moed.Status.Model = nil
	return moed
}

// refuseRealization refuses a realisation by which no plan would reach the engine, or by which adapters would change the wrong experts.
func refuseRealization(moed *semmoev1.MoEDeployment) error {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		return err
	}
	byMap := moed.Spec.Placement.Realization == semmoev1.RealizationEngineMap
	byWeights := moed.Spec.Placement.Realization == semmoev1.RealizationReshuffledWeights || adapter.ExpertMap == nil && !byMap
	if byWeights && desired.UsesPlans(moed) {
		if err := engine.CheckExternalExperts(moed.Spec.Engine.Args); err != nil {
			return fmt.Errorf("spec.engine.args: %w", err)
		}
	}
	if adapter.ExpertMap != nil || !byMap {
		return planner.CheckMap(moed, foundIn(moed), revisions.Release(moed, nil))
	}
	return fmt.Errorf("spec.placement.realization: %s reads no expert map, and EngineMap is one: use Auto or ReshuffledWeights", adapter.Type)
}

// refuseProfile: the profile would be refused when the operator makes it, and the model never be profiled.
func refuseProfile(moed *semmoev1.MoEDeployment) error {
	profile := planner.ProfileOf(moed)
	if profile == nil {
		return nil
	}
	err := affinityprofile.Validate(profile)
	if err == nil {
		return nil
	}
	err = fmt.Errorf("spec.profiling: the AffinityProfile that is made of it would be refused: %w", err)
	// A change of spec.template, which the profile has inherited, would start all pods anew.
	if profile.Spec.Template = nil; moed.Spec.Profiling.Template == nil && affinityprofile.Validate(profile) == nil {
		return fmt.Errorf("%w; or leave spec.template as it is, and set spec.profiling.template, which takes its place in the profile and restarts no pod", err)
	}
	return err
}

// refuseName: two MoEDeployments whose children have the same names take each other's Services.
func (m *moeDeployments) refuseName(ctx context.Context, moed *semmoev1.MoEDeployment) error {
	var others semmoev1.MoEDeploymentList
	if err := m.List(ctx, &others, client.InNamespace(moed.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return nil // as in a namespace that is not watched: the API server refuses what belongs to two
	}
	for i := range others.Items {
		other := &others.Items[i]
		for _, suffix := range desired.ChildSuffixes() {
			if moed.Name == other.Name+suffix || other.Name == moed.Name+suffix {
				return fmt.Errorf("metadata.name: %q and the MoEDeployment %q of this namespace would both have an object called %q: choose a name that does not differ by %q alone",
					moed.Name, other.Name, max(moed.Name, other.Name), suffix)
			}
		}
	}
	return nil
}

// refusePin: the spec of a plan never changes, so that one of another shape will never fit.
func (m *moeDeployments) refusePin(ctx context.Context, moed *semmoev1.MoEDeployment) error {
	if moed.Spec.Placement.PlanRef == nil {
		return nil
	}
	plan := &semmoev1.PlacementPlan{}
	if err := m.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: moed.Spec.Placement.PlanRef.Name}, plan); err != nil {
		return nil // warned of
	}
	return planner.CheckPin(moed, plan)
}

func (m *moeDeployments) warn(ctx context.Context, moed *semmoev1.MoEDeployment) []string {
	warnings := risks(moed)
	if plans(moed.Spec) {
		warnings = append(warnings, m.foresee(ctx, moed)...)
	} else {
		for _, warning := range revisions.Starts(moed, revisions.Release(moed, nil)).Warnings {
			warnings = append(warnings, warning.Reason+": "+warning.Message)
		}
	}
	if prometheus := moed.Spec.Drift.Prometheus; prometheus != nil && !m.hosts.Allows(prometheus.Address, moed.Namespace) {
		warnings = append(warnings, fmt.Sprintf("spec.drift.prometheus.address: %q is not contacted: a Service with a cluster IP, as http://<name>.%s.svc, or a host that the operator lists (--prometheus-hosts) is required",
			prometheus.Address, moed.Namespace))
	}
	if ref := moed.Spec.Placement.PlanRef; ref != nil {
		warnings = append(warnings, missing(ctx, m.Reader, &semmoev1.PlacementPlan{}, "PlacementPlan", "spec.placement.planRef.name", moed.Namespace, ref.Name)...)
	}
	if profiling := moed.Spec.Profiling; profiling != nil && profiling.ProfileRef != nil {
		warnings = append(warnings, missing(ctx, m.Reader, &semmoev1.AffinityProfile{}, "AffinityProfile", "spec.profiling.profileRef.name", moed.Namespace, profiling.ProfileRef.Name)...)
	}
	return warnings
}

// foresee warns of what the controller would report only after a profile was made, on the devices of the engine.
func (m *moeDeployments) foresee(ctx context.Context, moed *semmoev1.MoEDeployment) []string {
	var warnings []string
	for _, finding := range planner.Foresee(moed, checkpoint.Report{Family: m.family(ctx, moed)}, revisions.Release(moed, nil)) {
		warnings = append(warnings, finding.Reason+": "+finding.Message)
	}
	return warnings
}

// family returns the family of the model that the stored object was inspected with; empty before that, and where the
// spec now names another model.
func (m *moeDeployments) family(ctx context.Context, moed *semmoev1.MoEDeployment) string {
	stored := &semmoev1.MoEDeployment{}
	err := m.Get(ctx, client.ObjectKeyFromObject(moed), stored)
	if err != nil || stored.Status.Model == nil || !equality.Semantic.DeepEqual(stored.Spec.Model, moed.Spec.Model) {
		return ""
	}
	return stored.Status.Model.Family
}

// missing warns of an object that is named and does not exist, or not yet.
func missing(ctx context.Context, reader client.Reader, object client.Object, kind, field, namespace, name string) []string {
	if err := reader.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, object); apierrors.IsNotFound(err) {
		return []string{fmt.Sprintf("%s: there is no %s %q in namespace %s yet: it is waited for", field, kind, name, namespace)}
	}
	return nil
}

func (m *moeDeployments) warnDelete(context.Context, *semmoev1.MoEDeployment) []string { return nil }

// risk is a setting that is allowed, and that few want.
type risk struct {
	field   string
	applies func(semmoev1.MoEDeploymentSpec) bool
	message string
}

// risks are those that a MoEDeployment takes.
func risks(moed *semmoev1.MoEDeployment) []string {
	var warnings []string
	for _, risk := range allRisks {
		if risk.applies(moed.Spec) {
			warnings = append(warnings, risk.field+": "+risk.message)
		}
	}
	return warnings
}

var allRisks = []risk{
	{
		"spec.engine.image", func(s semmoev1.MoEDeploymentSpec) bool { return floating(s.Engine.Image) },
		"has no tag, or latest: pods that start later may run another engine than those that serve; name a version or a digest",
	},
	{
		"spec.rollout.soakSeconds", func(s semmoev1.MoEDeploymentSpec) bool {
			return plans(s) && s.Rollout.SoakSeconds != nil && *s.Rollout.SoakSeconds == 0
		},
		"0 promotes a new plan when its canary is ready, without comparing it with the one in service",
	},
	{
		"spec.rollout.rollback", func(s semmoev1.MoEDeploymentSpec) bool {
			return plans(s) && s.Rollout.Rollback == semmoev1.RollbackManual && s.Placement.Approval == semmoev1.ApprovalAutomatic
		},
		"Manual leaves a plan that fails on its canary until somebody acts, and plans are approved automatically",
	},
	{
		"spec.routing.mode", func(s semmoev1.MoEDeploymentSpec) bool {
			return plans(s) && s.Routing.Mode == semmoev1.RoutingModeNone && s.Parallelism.Attention == semmoev1.AttentionDataParallel
		},
		"with None nobody sends requests to the rank that holds their experts, and a plan alone gains next to nothing: use Router or EndpointPicker",
	},
	{
		"spec.routing.samplePercent", func(s semmoev1.MoEDeploymentSpec) bool {
			return plans(s) && s.Drift.Source == semmoev1.DriftSourceRouter && s.Routing.Mode != semmoev1.RoutingModeNone && s.Routing.SamplePercent != nil && *s.Routing.SamplePercent == 0
		},
		"0 observes nothing: neither is it told what a plan gains, nor that requests have drifted away from it",
	},
	{
		"spec.profiling", func(s semmoev1.MoEDeploymentSpec) bool { return !plans(s) },
		"is not set, and spec.placement.planRef is not either: no plan is made, and the model is served with the engine's " +
			"default placement; set spec.profiling.dataset",
	},
	{
		"spec.profiling.liveSamples", func(s semmoev1.MoEDeploymentSpec) bool {
			return s.Profiling != nil && s.Profiling.LiveSamples == semmoev1.LiveSamplesSequences
		},
		"Sequences keeps token ids of clients' requests in the request routers and, once a profile is made of them, in the artifact store; Counts keeps none",
	},
	{
		"spec.drift.prometheus", func(s semmoev1.MoEDeploymentSpec) bool {
			prometheus := s.Drift.Prometheus
			return prometheus != nil && prometheus.AuthSecret != "" && strings.HasPrefix(prometheus.Address, "http://")
		},
		"the token of authSecret is sent in clear to an address of http://: use https://",
	},
}

// plans tells that plans are made, or one is pinned.
func plans(s semmoev1.MoEDeploymentSpec) bool {
	return s.Profiling != nil || s.Placement.PlanRef != nil
}

// floating tells that an image reference may mean another image tomorrow.
func floating(image string) bool {
	if strings.Contains(image, "@") {
		return false
	}
	name := image[strings.LastIndex(image, "/")+1:] // a colon before is that of a registry's port
	_, tag, found := strings.Cut(name, ":")
	return !found || tag == "latest"
}
