// SPDX-License-Identifier: Apache-2.0

// Package plans reads the profiles, plans and tables of a MoEDeployment, and answers the questions of package planner,
// which decides on them.
package plans

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/calibration"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/internal/kube/apply"
	"github.com/semmoe/operator/internal/kube/lookup"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/kube/writes"
	"github.com/semmoe/operator/internal/plan/overlap"
	"github.com/semmoe/operator/internal/probe"
)

const (
	// recordTimeout is how long a reconciliation waits for a model's outputs; recordAgain is the delay until the next
	// attempt.
	recordTimeout = 45 * time.Second
	recordAgain   = 10 * time.Second
)

// Reader reads profiles, plans and tables.
type Reader struct {
	client.Client
	// Live bypasses the cache, which may be out of date.
	Live client.Reader
	// HTTP requests the outputs of a model without a plan from engines.
	HTTP *http.Client
}

// Observe adds the profiles, plans and tables to a snapshot that contains the MoEDeployment.
func (r *Reader) Observe(ctx context.Context, s *planner.Snapshot) error {
	if err := r.observeOwn(ctx, s); err != nil {
		return err
	}
	s.NamedProfiles, s.NamedPlans = map[string]*semmoev1.AffinityProfile{}, map[string]*semmoev1.PlacementPlan{}
	if !desired.UsesPlans(s.Moed) && len(s.Profiles)+len(s.Plans) == 0 && len(s.Workloads) == 0 {
		return nil
	}
	tables := &corev1.ConfigMap{}
	err := r.Get(ctx, client.ObjectKey{Namespace: s.Moed.Namespace, Name: desired.TablesName(s.Moed)}, tables)
	switch {
	case err == nil:
		s.Tables = tables
	case !apierrors.IsNotFound(err):
		return fmt.Errorf("failed to get ConfigMap %s: %w", desired.TablesName(s.Moed), err)
	}
	if s.Report == nil {
		return nil
	}
	if name := planner.ProfileName(s.Moed, s.Report.ModelDigest); name != "" {
		if err := r.Answer(ctx, s, planner.ProfileNamed{Name: name}); err != nil {
			return err
		}
	}
	s.Hardware, err = calibration.ReadProfile(ctx, r.Live, s.Moed.Namespace, s.Moed.Spec.Placement.Hardware)
	if s.HardwareFault = machines.AsProfileError(err); err != nil && s.HardwareFault == nil {
		return err
	}
	if !desired.UsesPlans(s.Moed) {
		return nil
	}
	return errors.Join(r.observePin(ctx, s), r.observeOutputs(ctx, s))
}

func (r *Reader) observeOwn(ctx context.Context, s *planner.Snapshot) error {
	var profiles semmoev1.AffinityProfileList
	var plans semmoev1.PlacementPlanList
	// List only own plans: with one plan per MoEDeployment in a namespace, the cost would grow with the square of their
	// number.
	ours := []client.ListOption{client.InNamespace(s.Moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: s.Moed.Name}}
	if err := errors.Join(r.List(ctx, &profiles, ours...), r.List(ctx, &plans, ours...)); err != nil {
		return fmt.Errorf("failed to list profiles and plans: %w", err)
	}
	s.Profiles, s.Plans = nil, nil
	for i := range profiles.Items {
		if profile := &profiles.Items[i]; metav1.IsControlledBy(profile, s.Moed) {
			s.Profiles = append(s.Profiles, profile)
		}
	}
	for i := range plans.Items {
		if plan := &plans.Items[i]; metav1.IsControlledBy(plan, s.Moed) {
			s.Plans = append(s.Plans, plan)
		}
	}
	planner.NewestFirst(s.Plans)
	return nil
}

// observePin reads the plan that the spec pins, without the cache if the cache lacks it.
func (r *Reader) observePin(ctx context.Context, s *planner.Snapshot) error {
	if s.Moed.Spec.Placement.PlanRef == nil {
		return nil
	}
	name, plan := s.Moed.Spec.Placement.PlanRef.Name, &semmoev1.PlacementPlan{}
	found, err := lookup.Find(ctx, r.Client, r.Live, client.ObjectKey{Namespace: s.Moed.Namespace, Name: name}, plan)
	if err != nil {
		return fmt.Errorf("failed to get PlacementPlan %s: %w", name, err)
	}
	if found {
		s.NamedPlans[name] = plan
	}
	return nil
}

func (r *Reader) observeOutputs(ctx context.Context, s *planner.Snapshot) error {
	var stored corev1.ConfigMapList
	if err := r.List(ctx, &stored, client.InNamespace(s.Moed.Namespace), client.MatchingLabels(desired.Selector(s.Moed, semmoev1.ComponentAnswers))); err != nil {
		return fmt.Errorf("failed to list stored answers: %w", err)
	}
	for i := range stored.Items {
		s.StoredOutputs = append(s.StoredOutputs, &stored.Items[i])
	}
	return nil
}

// Answer adds the answer to a question of package planner to the snapshot.
func (r *Reader) Answer(ctx context.Context, s *planner.Snapshot, question planner.Question) error {
	key := func(name string) client.ObjectKey { return client.ObjectKey{Namespace: s.Moed.Namespace, Name: name} }
	switch q := question.(type) {
	case planner.ProfileNamed:
		profile := &semmoev1.AffinityProfile{}
		err := r.Get(ctx, key(q.Name), profile)
		if err != nil {
			profile = nil
		}
		s.NamedProfiles[q.Name] = profile
		return client.IgnoreNotFound(err)
	case planner.PlanNamed:
		plan := &semmoev1.PlacementPlan{}
		err := r.Get(ctx, key(q.Name), plan)
		if err != nil {
			plan = nil
		}
		s.NamedPlans[q.Name] = plan
		return client.IgnoreNotFound(err)
	case planner.EveryPlan:
		var list semmoev1.PlacementPlanList
		if err := r.List(ctx, &list, client.InNamespace(s.Moed.Namespace)); err != nil {
			return fmt.Errorf("failed to list the plans of the namespace: %w", err)
		}
		var plans []*semmoev1.PlacementPlan
		for i := range list.Items {
			plans = append(plans, &list.Items[i])
		}
		s.OtherPlans = &plans
	case planner.OverlapModel:
		return r.readOverlapModel(ctx, s, q.Plan)
	case planner.LatestSpec:
		changed, err := childobjects.SpecChanged(ctx, r.Live, s.Moed)
		s.SpecLatest = new(!changed)
		return err
	case planner.ReferencesOfOthers:
		return r.readReferences(ctx, s, q.Pods)
	case planner.BaselineOutputs:
		return r.recordOutputs(ctx, s, q.Pod)
	default:
		return fmt.Errorf("unknown question %T", question)
	}
	return nil
}

// readOverlapModel reads the models of a plan from its ConfigMap. A ConfigMap that is damaged or missing is part of the answer.
func (r *Reader) readOverlapModel(ctx context.Context, s *planner.Snapshot, plan *semmoev1.PlacementPlan) error {
	var answer planner.OverlapModelOf
	configMap := &corev1.ConfigMap{}
	err := r.Get(ctx, client.ObjectKey{Namespace: plan.Namespace, Name: plan.Status.ConfigMap}, configMap)
	if err == nil {
		answer.Model, err = overlap.Read(configMap.Data, plan.Status.PlanDigest)
	} else if !apierrors.IsNotFound(err) {
		return fmt.Errorf("failed to read the models of PlacementPlan %s: %w", plan.Name, err)
	}
	if err != nil {
		answer.Fault = fmt.Sprintf("ConfigMap %s: %v", plan.Status.ConfigMap, err)
	}
	if s.OverlapModels == nil {
		s.OverlapModels = map[string]planner.OverlapModelOf{}
	}
	s.OverlapModels[plan.Status.PlanDigest] = answer
	return nil
}

// readReferences reads the references of other objects to profiles and plans. It reads pods without the cache, which
// contains only the operator's pods, and only if a plan is to be deleted.
func (r *Reader) readReferences(ctx context.Context, s *planner.Snapshot, withPods bool) error {
	var moeds semmoev1.MoEDeploymentList
	var made semmoev1.PlacementPlanList
	here := client.InNamespace(s.Moed.Namespace)
	if err := errors.Join(r.List(ctx, &moeds, here, client.UnsafeDisableDeepCopy), r.List(ctx, &made, here, client.UnsafeDisableDeepCopy)); err != nil {
		return fmt.Errorf("failed to list the users of profiles and plans: %w", err)
	}
	var pods *corev1.PodList
	if withPods {
		pods = &corev1.PodList{}
		if err := r.Live.List(ctx, pods, here); err != nil {
			return fmt.Errorf("failed to list pods that mount plans: %w", err)
		}
	}
	s.References = planner.NewReferenceSet(s.Moed, moeds.Items, made.Items, pods)
	return nil
}

// recordOutputs requests the model's outputs from a pod, and stores them in a ConfigMap. A pod that does not answer, or
// a ConfigMap that is refused, is part of the answer.
func (r *Reader) recordOutputs(ctx context.Context, s *planner.Snapshot, pod *corev1.Pod) error {
	recorded, err := r.outputsOf(ctx, s, pod)
	if err != nil {
		s.Outputs = &planner.RecordedOutputs{Missing: fmt.Sprintf("pod %s did not return the baseline outputs: %v", pod.Name, err), Again: recordAgain}
		return nil
	}
	configMap := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Moed.Namespace, Name: revisions.AnswersName(s.Moed, s.Report.ModelDigest),
			Labels:          desired.Labels(s.Moed, semmoev1.ComponentAnswers),
			OwnerReferences: ownership.ControllerReference(s.Moed, "MoEDeployment"),
		},
		Immutable: new(true),
		Data:      map[string]string{revisions.AnswersFile: string(recorded)},
	}
	err = r.Create(ctx, configMap, client.FieldOwner(desired.Manager))
	if err == nil || apierrors.IsAlreadyExists(err) {
		apply.LogWrite(ctx, 0, "Stored the baseline outputs of the model", configMap, "pod", pod.Name)
		s.Outputs = &planner.RecordedOutputs{}
		return nil
	}
	err = writes.Refusable(fmt.Errorf("failed to create ConfigMap %s: %w", configMap.Name, err))
	if !writes.IsRefused(err) {
		return err
	}
	s.Outputs = &planner.RecordedOutputs{Missing: fmt.Sprintf("the baseline outputs cannot be stored: %v", err), Refused: err}
	return nil
}

// outputsOf requests the model's outputs from a pod.
func (r *Reader) outputsOf(ctx context.Context, s *planner.Snapshot, pod *corev1.Pod) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	engine := &probe.Client{
		Address: revisions.EngineURL(pod), Model: revisions.Launch(s.Moed).ServedModelName, HTTP: r.HTTP,
	}
	recorded, err := probe.Record(ctx, engine, s.Report.ModelDigest)
	if err != nil {
		return nil, err
	}
	return recorded.Encode()
}
