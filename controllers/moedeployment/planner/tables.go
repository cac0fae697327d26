package planner

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreac "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// tablesInUse returns, by the digest of the plan of the pods, the digest of the plan whose tables routers are
// configured to use. live is the ConfigMap; nil if there is none. A ConfigMap with invalid content counts as empty.
// Routers also read a ConfigMap of another owner, so the result is valid even with that error.
func (pl *Planner) tablesInUse(ctx context.Context, moed *semmoev1.MoEDeployment) (inUse map[string]string, live *corev1.ConfigMap, err error) {
	live = &corev1.ConfigMap{}
	err = pl.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: desired.TablesName(moed)}, live)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil, nil
	case err != nil:
		return nil, nil, fmt.Errorf("failed to get ConfigMap %s: %w", desired.TablesName(moed), err)
	}
	if json.Unmarshal([]byte(live.Data[semmoev1.TablesKey]), &inUse) != nil {
		inUse = nil
	}
	if !metav1.IsControlledBy(live, moed) {
		err = foreign("ConfigMap %s exists and belongs to another owner: delete it", live.Name)
	}
	return inUse, live, err
}

// plansInUse returns the MoEDeployment's own plans and, for each digest in use, the plan with that digest, which may be
// a pinned plan of another owner. It omits plans that are being deleted: deleting a plan reverts its tables.
func (pl *Planner) plansInUse(ctx context.Context, moed *semmoev1.MoEDeployment, ours []*semmoev1.PlacementPlan, inUse map[string]string) ([]*semmoev1.PlacementPlan, error) {
	plans := slices.DeleteFunc(slices.Clone(ours), func(plan *semmoev1.PlacementPlan) bool { return plan.DeletionTimestamp != nil })
	unknown := func(digest string) bool { return PlanWithDigest(digest, plans) == nil }
	if !slices.ContainsFunc(slices.Collect(maps.Values(inUse)), unknown) {
		return plans, nil
	}
	var list semmoev1.PlacementPlanList
	if err := pl.List(ctx, &list, client.InNamespace(moed.Namespace)); err != nil {
		return nil, fmt.Errorf("failed to list plans whose tables are in use: %w", err)
	}
	for i := range list.Items {
		if plan := &list.Items[i]; plan.DeletionTimestamp == nil {
			plans = append(plans, plan)
		}
	}
	return plans, nil
}

// reconcileTables configures the tables that routers use with the layouts in service, and adds the tables of the
// serving layout to the planning. While paused, it changes nothing.
func (pl *Planner) reconcileTables(ctx context.Context, moed *semmoev1.MoEDeployment, modelDigest string, p *Planning, workloads []*revisions.Workload, active bool) error {
	inUse, live, inTheWay := pl.tablesInUse(ctx, moed)
	if inTheWay != nil && !IsRefused(inTheWay) {
		return inTheWay
	}
	if live != nil {
		p.TablesSince = changedAt(live)
	}
	var err error
	if p.InUse, err = pl.plansInUse(ctx, moed, p.Plans, inUse); err != nil {
		return err
	}
	if inTheWay != nil {
		p.keepTables(inUse)
		return inTheWay
	}
	wanted := map[string]string{}
	for _, layout := range layoutsInService(p, workloads) {
		tables, hold := p.tablesFor(moed, modelDigest, layout, inUse[layout])
		if tables != nil {
			wanted[layout] = tables.Status.PlanDigest
			p.Named = append(p.Named, tables.Name)
		}
		if p.Serving != nil && p.Serving.Digest == layout {
			p.Tables, p.TablesHold = tables, hold
		}
	}
	if !active || live == nil && len(wanted) == 0 {
		return nil
	}
	intent, err := tablesConfigMap(moed, wanted)
	if err != nil {
		return err
	}
	if err := childobjects.Ensure(ctx, pl.Client, pl.Live, moed, &corev1.ConfigMap{}, intent, coreac.ExtractConfigMap); err != nil {
		p.keepTables(inUse)
		return refusable(fmt.Errorf("failed to reconcile the ConfigMap of the tables: %w", err))
	}
	if p.Serving != nil && wanted[p.Serving.Digest] != inUse[p.Serving.Digest] {
		p.TablesSince = pl.Now()
		pl.recordTablesSwitch(moed, p)
	}
	return nil
}

// changedAt returns when this controller last changed an object, according to its managed fields, or the creation time.
func changedAt(object client.Object) time.Time {
	at := object.GetCreationTimestamp().Time
	for _, fields := range object.GetManagedFields() {
		if fields.Manager == desired.Manager && fields.Time != nil && fields.Time.After(at) {
			at = fields.Time.Time
		}
	}
	return at
}

// keepTables keeps the tables that routers use now.
func (p *Planning) keepTables(inUse map[string]string) {
	if p.Serving != nil {
		p.Tables = PlanWithDigest(inUse[p.Serving.Digest], p.InUse)
	}
	for _, digest := range inUse {
		if plan := PlanWithDigest(digest, p.InUse); plan != nil {
			p.Named = append(p.Named, plan.Name)
		}
	}
}

// recordTablesSwitch records an event for the switch of the routers to other tables.
func (pl *Planner) recordTablesSwitch(moed *semmoev1.MoEDeployment, p *Planning) {
	if p.Tables == nil {
		pl.Recorder.Eventf(moed, nil, corev1.EventTypeNormal, "TablesReverted", "Replan", "The routers reverted to the tables of plan %s", p.Serving.Short())
		return
	}
	pl.Recorder.Eventf(moed, p.Tables, corev1.EventTypeNormal, "TablesSwapped", "Replan", "The routers use the tables of plan %s with the placement of plan %s (%s); no pod is restarted",
		p.Tables.Status.Plan, p.Serving.Short(), comparisonText(p.Tables))
}

// tablesFor returns the plan whose tables are used with a layout: the pinned tables, or the newest of the lineage. For
// a layout that the spec does not want (yet), the tables in use stay, so that serving does not degrade before the
// layout is replaced. nil means the layout's own tables.
func (p *Planning) tablesFor(moed *semmoev1.MoEDeployment, modelDigest, layout, inUse string) (*semmoev1.PlacementPlan, desired.Finding) {
	kept, pin := PlanWithDigest(inUse, p.InUse), p.PinnedTables
	switch {
	case moed.Spec.Placement.PlanRef == nil:
		tables, held := p.Lineage.tablesFor(moed, modelDigest, layout, inUse)
		if tables == nil && !isOf(p.Plan, layout) {
			tables = kept
		}
		return tables, held
	case pin != nil && pin.Spec.Current.PlanDigest == layout:
		if hold := holdTables(moed, pin); hold.Reason != "" && pin.Status.PlanDigest != inUse {
			return kept, hold
		}
		return pin, desired.Finding{}
	case isOf(p.Plan, layout):
		return nil, desired.Finding{}
	}
	return kept, desired.Finding{}
}

// isOf reports whether the plan has the layout with this digest.
func isOf(plan *semmoev1.PlacementPlan, layout string) bool {
	return plan != nil && plan.Status.PlanDigest == layout
}

// layoutsInService returns the digests of the plans that pods serve under, or will.
func layoutsInService(p *Planning, workloads []*revisions.Workload) []string {
	var digests []string
	seen := map[string]bool{"": true}
	add := func(digest string) {
		if !seen[digest] {
			seen[digest], digests = true, append(digests, digest)
		}
	}
	for _, l := range []*revisions.Layout{p.Serving, p.Candidate} {
		if l != nil {
			add(l.Digest)
		}
	}
	for _, workload := range workloads {
		add(workload.Template().Annotations[semmoev1.AnnotationPlanDigest])
	}
	return digests
}

func tablesConfigMap(moed *semmoev1.MoEDeployment, tables map[string]string) (*coreac.ConfigMapApplyConfiguration, error) {
	text, err := json.Marshal(tables) // in the order of the keys
	if err != nil {
		return nil, err
	}
	return coreac.ConfigMap(desired.TablesName(moed), moed.Namespace).
		WithLabels(desired.Labels(moed, semmoev1.ComponentTables)).
		WithOwnerReferences(desired.OwnerReference(moed)).
		WithData(map[string]string{semmoev1.TablesKey: string(text)}), nil
}
