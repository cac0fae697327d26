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
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// tablesInUse reads, by the digest of the plan that pods were made for, the digest of the plan whose tables routers are told to use.
// live is the ConfigMap, nil where there is none; one that somebody has damaged says nothing. Routers read one of somebody else's, too: beside
// that error what they read holds.
func (pl *Planner) tablesInUse(ctx context.Context, moed *semmoev1.MoEDeployment) (inUse map[string]string, live *corev1.ConfigMap, err error) {
	live = &corev1.ConfigMap{}
	err = pl.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: desired.TablesName(moed)}, live)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil, nil
	case err != nil:
		return nil, nil, fmt.Errorf("get ConfigMap %s: %w", desired.TablesName(moed), err)
	}
	if json.Unmarshal([]byte(live.Data[semmoev1.TablesKey]), &inUse) != nil {
		inUse = nil
	}
	if !metav1.IsControlledBy(live, moed) {
		err = foreign("ConfigMap %s exists and belongs to somebody else: delete it", live.Name)
	}
	return inUse, live, err
}

// plansInUse are our plans, and with them the one of each digest in use, which may be somebody else's that the spec has pinned. One that is
// being deleted is none of them: to delete it takes its tables back.
func (pl *Planner) plansInUse(ctx context.Context, moed *semmoev1.MoEDeployment, ours []*semmoev1.PlacementPlan, inUse map[string]string) ([]*semmoev1.PlacementPlan, error) {
	plans := slices.DeleteFunc(slices.Clone(ours), func(plan *semmoev1.PlacementPlan) bool { return plan.DeletionTimestamp != nil })
	unknown := func(digest string) bool { return PlanWithDigest(digest, plans) == nil }
	if !slices.ContainsFunc(slices.Collect(maps.Values(inUse)), unknown) {
		return plans, nil
	}
	var list semmoev1.PlacementPlanList
	if err := pl.List(ctx, &list, client.InNamespace(moed.Namespace)); err != nil {
		return nil, fmt.Errorf("list plans whose tables are in use: %w", err)
	}
	for i := range list.Items {
		if plan := &list.Items[i]; plan.DeletionTimestamp == nil {
			plans = append(plans, plan)
		}
	}
	return plans, nil
}

// reconcileTables tells the routers which tables to use with the layouts in service, and completes the planning by what they use with
// the one that serves. While paused it leaves all as it is.
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
	if err := desired.Ensure(ctx, pl.Client, pl.Live, moed, &corev1.ConfigMap{}, intent, coreac.ExtractConfigMap); err != nil {
		p.keepTables(inUse)
		return refusable(fmt.Errorf("reconcile ConfigMap of the tables: %w", err))
	}
	if p.Serving != nil && wanted[p.Serving.Digest] != inUse[p.Serving.Digest] {
		p.TablesSince = pl.Now()
		pl.tellTables(moed, p)
	}
	return nil
}

// changedAt is when we last changed an object, as the API server keeps it with the fields that are ours, or when it was made.
func changedAt(object client.Object) time.Time {
	at := object.GetCreationTimestamp().Time
	for _, fields := range object.GetManagedFields() {
		if fields.Manager == desired.Manager && fields.Time != nil && fields.Time.After(at) {
			at = fields.Time.Time
		}
	}
	return at
}

// keepTables is that the routers go on with what they have.
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

// tellTables records that the routers are told to use other tables.
func (pl *Planner) tellTables(moed *semmoev1.MoEDeployment, p *Planning) {
	if p.Tables == nil {
		pl.Recorder.Eventf(moed, nil, corev1.EventTypeNormal, "TablesReverted", "Replan", "The routers go back to the tables of plan %s", p.Serving.Short())
		return
	}
	pl.Recorder.Eventf(moed, p.Tables, corev1.EventTypeNormal, "TablesSwapped", "Replan", "The routers use the tables of plan %s with the placement of plan %s (%s); no pod is restarted",
		p.Tables.Status.Plan, p.Serving.Short(), comparisonText(p.Tables))
}

// tablesFor is the plan whose tables are used with a layout: that which the spec pins, or the newest of the lineage. With a layout that the
// spec does not ask for, or not yet, what is in use stays so: what serves is made no worse before it is replaced. nil is for the layout's own.
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

// isOf tells that a layout, by its digest, is a plan's.
func isOf(plan *semmoev1.PlacementPlan, layout string) bool {
	return plan != nil && plan.Status.PlanDigest == layout
}

// layoutsInService are the digests of the plans that pods serve under, or will.
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
