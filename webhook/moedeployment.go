// SPDX-License-Identifier: Apache-2.0

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
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/observation/promquery"
)

// moeDeployments validates MoEDeployments.
type moeDeployments struct {
	client.Reader
	// hosts are the Prometheus servers that objects of all namespaces may use.
	hosts promquery.Hosts
}

func (m *moeDeployments) refuse(ctx context.Context, moed *semmoev1.MoEDeployment) []error {
	var faults []error
	for _, fault := range revisions.Faults(moed) {
		faults = append(faults, fault)
	}
	if _, err := registry.For(string(moed.Spec.Engine.Type)); err != nil {
		return faults // nothing else can be validated for an unknown engine
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

// refuseModel returns an error for a spec that contradicts the inspected model, like the controller after the
// inspection. A new object has no status, and hence no inspected model.
func refuseModel(moed *semmoev1.MoEDeployment) error {
	if moed.Status.Model == nil {
		return nil
	}
	if err := revisions.ValidateModel(moed, foundIn(moed)); err != nil {
		return err
	}
	return nil // a plain nil, because a nil *InvalidError in an error is not nil
}

// foundIn returns the inspected model in the status. Before the inspection it returns the zero value, which accepts
// every spec.
func foundIn(moed *semmoev1.MoEDeployment) checkpoint.Report {
	model := moed.Status.Model
	if model == nil {
		return checkpoint.Report{}
	}
	return checkpoint.Report{
		Family: model.Family, Experts: int(model.Experts), ExpertsPerToken: int(model.ExpertsPerToken),
		Unprofilable: model.Unprofilable, Unmappable: model.Unmappable, Unpermutable: model.Unpermutable,
	}
}

// replacing removes the model from the status if it is not the model of the spec. In an update the status is from the
// stored object, which may have another checkpoint.
func (m *moeDeployments) replacing(stored, moed *semmoev1.MoEDeployment) *semmoev1.MoEDeployment {
	if stored.Status.ObservedGeneration == stored.Generation && equality.Semantic.DeepEqual(stored.Spec.Model, moed.Spec.Model) {
		return moed
	}
	moed = moed.DeepCopy()
	moed.Status.Model = nil
	return moed
}

// refuseRealization returns an error for a realization by which no plan reaches the engine, or by which adapters would
// change the wrong experts.
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
	return fmt.Errorf("spec.placement.realization: %s reads no expert map, which EngineMap requires: use Auto or ReshuffledWeights", adapter.Type)
}

// refuseProfile returns an error if the AffinityProfile that the operator creates would be rejected, so that the model
// could not be profiled.
func refuseProfile(moed *semmoev1.MoEDeployment) error {
	profile := planner.ProfileOf(moed)
	if profile == nil {
		return nil
	}
	err := affinityprofile.Validate(profile)
	if err == nil {
		return nil
	}
	err = fmt.Errorf("spec.profiling: the resulting AffinityProfile would be rejected: %w", err)
	// A change of spec.template, which the profile inherits, restarts all pods.
	if profile.Spec.Template = nil; moed.Spec.Profiling.Template == nil && affinityprofile.Validate(profile) == nil {
		return fmt.Errorf("%w; or set spec.profiling.template, which replaces spec.template in the profile and restarts no pod", err)
	}
	return err
}

// refuseName returns an error if two MoEDeployments would create objects with the same names.
func (m *moeDeployments) refuseName(ctx context.Context, moed *semmoev1.MoEDeployment) error {
	var others semmoev1.MoEDeploymentList
	if err := m.List(ctx, &others, client.InNamespace(moed.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return nil // for example a namespace that is not watched; the API server rejects objects with two owners
	}
	for i := range others.Items {
		other := &others.Items[i]
		for _, suffix := range desired.ChildSuffixes() {
			if moed.Name == other.Name+suffix || other.Name == moed.Name+suffix {
				return fmt.Errorf("metadata.name: %q and MoEDeployment %q of this namespace would both have an object called %q: choose a name that differs by more than %q",
					moed.Name, other.Name, max(moed.Name, other.Name), suffix)
			}
		}
	}
	return nil
}

// refusePin returns an error if spec.placement.planRef pins a plan for another parallelism. The spec of a plan is
// immutable, so the plan will never fit.
func (m *moeDeployments) refusePin(ctx context.Context, moed *semmoev1.MoEDeployment) error {
	if moed.Spec.Placement.PlanRef == nil {
		return nil
	}
	plan := &semmoev1.PlacementPlan{}
	if err := m.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: moed.Spec.Placement.PlanRef.Name}, plan); err != nil {
		return nil // a missing plan causes a warning
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
		warnings = append(warnings, fmt.Sprintf("spec.drift.prometheus.address: %q is not contacted: a Service with a cluster IP, as http://<name>.%s.svc, or a host that the operator allows (--prometheus-hosts) is required",
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

// foresee returns warnings for problems that the controller would report only after a profile was recorded on the
// devices of the engine.
func (m *moeDeployments) foresee(ctx context.Context, moed *semmoev1.MoEDeployment) []string {
	var warnings []string
	for _, finding := range planner.Foresee(moed, m.inspected(ctx, moed), revisions.Release(moed, nil)) {
		warnings = append(warnings, finding.Reason+": "+finding.Message)
	}
	return warnings
}

// inspected returns the model that the stored object was inspected with. It returns the zero value before the inspection,
// and if the spec has another model now.
func (m *moeDeployments) inspected(ctx context.Context, moed *semmoev1.MoEDeployment) checkpoint.Report {
	stored := &semmoev1.MoEDeployment{}
	err := m.Get(ctx, client.ObjectKeyFromObject(moed), stored)
	if err != nil || stored.Status.Model == nil || !equality.Semantic.DeepEqual(stored.Spec.Model, moed.Spec.Model) {
		return checkpoint.Report{}
	}
	return foundIn(stored)
}

// missing returns a warning if a referenced object does not exist.
func missing(ctx context.Context, reader client.Reader, object client.Object, kind, field, namespace, name string) []string {
	if err := reader.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, object); apierrors.IsNotFound(err) {
		return []string{fmt.Sprintf("%s: %s %q does not exist in namespace %s yet: the operator waits for it", field, kind, name, namespace)}
	}
	return nil
}

func (m *moeDeployments) warnDelete(context.Context, *semmoev1.MoEDeployment) []string { return nil }

// risk is a valid but rarely intended setting.
type risk struct {
	field   string
	applies func(semmoev1.MoEDeploymentSpec) bool
	message string
}

// risks returns the warnings for the risky settings of a MoEDeployment.
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
		"has no tag, or the tag latest: pods that start later may run another engine version; use a version or a digest",
	},
	{
		"spec.rollout.soakSeconds", func(s semmoev1.MoEDeploymentSpec) bool {
			return plans(s) && s.Rollout.SoakSeconds != nil && *s.Rollout.SoakSeconds == 0
		},
		"0 promotes a new plan when its canary is ready, without a comparison with the plan in service",
	},
	{
		"spec.rollout.compare", func(s semmoev1.MoEDeploymentSpec) bool {
			return s.Rollout.Compare == semmoev1.CompareAll && s.Replicas != nil && *s.Replicas == 1 && s.Rollout.MaxSurge != nil && *s.Rollout.MaxSurge == 0
		},
		"All has no effect with one replica and maxSurge 0: there is no second replica to compare a change with; set maxSurge",
	},
	{
		"spec.rollout.compare", func(s semmoev1.MoEDeploymentSpec) bool {
			return s.Rollout.Compare == semmoev1.CompareAll && s.Rollout.SoakSeconds != nil && *s.Rollout.SoakSeconds == 0
		},
		"All compares nothing with soakSeconds 0: a change is promoted when its canary is ready",
	},
	{
		"spec.rollout.rollback", func(s semmoev1.MoEDeploymentSpec) bool {
			return plans(s) && s.Rollout.Rollback == semmoev1.RollbackManual && s.Placement.Approval == semmoev1.ApprovalAutomatic
		},
		"Manual leaves a failed plan on its canary until a user acts, although plans are approved automatically",
	},
	{
		"spec.routing.mode", func(s semmoev1.MoEDeploymentSpec) bool {
			return plans(s) && s.Routing.Mode == semmoev1.RoutingModeNone && s.Parallelism.Attention == semmoev1.AttentionDataParallel
		},
		"with None requests are not routed to the ranks of their experts, and a plan gains almost nothing: use Router or EndpointPicker",
	},
	{
		"spec.routing.samplePercent", func(s semmoev1.MoEDeploymentSpec) bool {
			return plans(s) && s.Drift.Source == semmoev1.DriftSourceRouter && s.Routing.Mode != semmoev1.RoutingModeNone && s.Routing.SamplePercent != nil && *s.Routing.SamplePercent == 0
		},
		"with 0 neither the local activation rate of a plan nor drift is observed",
	},
	{
		"spec.profiling", func(s semmoev1.MoEDeploymentSpec) bool { return !plans(s) },
		"is not set, nor is spec.placement.planRef: no plan is made, and the model is served with the engine's " +
			"default placement; set spec.profiling.dataset, to {ownText: {}} if you have no data set",
	},
	{
		"spec.profiling.liveSamples", func(s semmoev1.MoEDeploymentSpec) bool {
			return s.Profiling != nil && s.Profiling.LiveSamples == semmoev1.LiveSamplesSequences
		},
		"Sequences stores token IDs of client requests in the request routers, and in the artifact store when a profile is made; Counts stores none",
	},
	{
		"spec.drift.prometheus", func(s semmoev1.MoEDeploymentSpec) bool {
			prometheus := s.Drift.Prometheus
			return prometheus != nil && prometheus.AuthSecret != "" && strings.HasPrefix(prometheus.Address, "http://")
		},
		"the token in authSecret is sent unencrypted to an http:// address: use https://",
	},
}

// plans reports whether plans are made or one is pinned.
func plans(s semmoev1.MoEDeploymentSpec) bool {
	return s.Profiling != nil || s.Placement.PlanRef != nil
}

// floating reports whether an image reference can refer to another image later.
func floating(image string) bool {
	if strings.Contains(image, "@") {
		return false
	}
	name := image[strings.LastIndex(image, "/")+1:] // a colon before the last slash belongs to the port of a registry
	_, tag, found := strings.Cut(name, ":")
	return !found || tag == "latest"
}
