// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreac "k8s.io/client-go/applyconfigurations/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/writes"
)

// tablesInUse returns, by the digest of the plan of the pods, the digest of the plan whose tables routers are
// configured to use. A ConfigMap with invalid content counts as empty. Routers also read a ConfigMap of another owner.
func (s *Snapshot) tablesInUse() map[string]string {
	var inUse map[string]string
	if s.Tables == nil || json.Unmarshal([]byte(s.Tables.Data[semmoev1.TablesKey]), &inUse) != nil {
		return nil
	}
	return inUse
}

// tablesSince returns when the tables in use were last changed; zero if there is no ConfigMap.
func (s *Snapshot) tablesSince() time.Time {
	if s.Tables == nil {
		return time.Time{}
	}
	return changedAt(s.Tables)
}

// plansInUse returns the MoEDeployment's own plans and, for each digest in use, the plan with that digest, which may be
// a pinned plan of another owner. It omits plans that are being deleted: deleting a plan reverts its tables.
func (s *Snapshot) plansInUse(inUse map[string]string) ([]*semmoev1.PlacementPlan, Question) {
	going := func(plan *semmoev1.PlacementPlan) bool { return plan.DeletionTimestamp != nil }
	plans := slices.DeleteFunc(slices.Clone(s.Plans), going)
	unknown := func(digest string) bool { return PlanWithDigest(digest, plans) == nil }
	switch {
	case !slices.ContainsFunc(slices.Collect(maps.Values(inUse)), unknown):
		return plans, nil
	case s.OtherPlans == nil:
		return nil, EveryPlan{}
	}
	return append(plans, slices.DeleteFunc(slices.Clone(*s.OtherPlans), going)...), nil
}

// decideTables determines the tables that routers use with the layouts in service, and the plan whose prediction
// applies.
func (d *Decision) decideTables(s *Snapshot) {
	if !desired.UsesPlans(s.Moed) {
		return
	}
	if d.selectTables(s); d.Question == nil && d.Err == nil {
		d.Promise = d.promise(appendPlan(s.Plans, d.Plan))
	}
}

func (d *Decision) selectTables(s *Snapshot) {
	inUse := s.tablesInUse()
	d.TablesSince = s.tablesSince()
	if d.InUse, d.Question = s.plansInUse(inUse); d.Question != nil {
		return
	}
	if s.Tables != nil && !metav1.IsControlledBy(s.Tables, s.Moed) {
		d.refuse(writes.Foreign("ConfigMap %s exists and belongs to another owner: delete it", s.Tables.Name))
		d.keepTables(inUse)
		return
	}
	wanted := map[string]string{}
	for _, layout := range layoutsInService(&d.Planning, s.Workloads) {
		tables, hold := d.tablesFor(s.Moed, s.Workloads, s.Report.ModelDigest, layout, inUse[layout])
		if tables != nil {
			wanted[layout] = tables.Status.PlanDigest
			d.Named = append(d.Named, tables.Name)
		}
		if d.Serving != nil && d.Serving.Digest == layout {
			d.Tables, d.TablesHold = tables, hold
		}
	}
	switch {
	case desired.Paused(s.Moed) || s.Tables == nil && len(wanted) == 0:
		return
	case s.TablesRefused:
		d.keepTables(inUse)
		return
	}
	write := desired.ApplyConfigMap{}
	if write.Intent, d.Err = tablesConfigMap(s.Moed, wanted); d.Err != nil {
		return
	}
	if d.Serving != nil && wanted[d.Serving.Digest] != inUse[d.Serving.Digest] {
		d.TablesSince, write.Event = s.Now, tablesSwitch(s.Moed, &d.Planning)
	}
	d.write(write)
}

// promise returns the plan whose prediction applies to the layout in service: that of the tables in use, or that of the
// layout's plan. A plan from token counts has no forecast.
func (p *Planning) promise(plans []*semmoev1.PlacementPlan) *semmoev1.PlacementPlan {
	if p.Tables != nil && p.Tables.Status.Forecast != nil {
		return p.Tables
	}
	return promiseOf(p.Serving, plans...)
}

// changedAt returns when this controller last changed an object, according to its managed fields, or the creation time.
func changedAt(object metav1.Object) time.Time {
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

// tablesSwitch returns the event for the switch of the routers, or of the engines, to other tables.
func tablesSwitch(moed *semmoev1.MoEDeployment, p *Planning) *writes.Event {
	users := "routers"
	if desired.Shuffles(moed) {
		users = "engines"
	}
	if p.Tables == nil {
		return &writes.Event{Name: "TablesReverted", Action: "Replan", Message: fmt.Sprintf("The %s revert to the tables of plan %s", users, p.Serving.Short())}
	}
	return &writes.Event{Name: "TablesSwapped", Action: "Replan", Related: p.Tables, Message: fmt.Sprintf(
		"The %s change to the tables of plan %s with the placement of plan %s (%s); no pod is restarted", users, p.Tables.Status.Plan, p.Serving.Short(), comparisonText(p.Tables))}
}

// tablesFor returns the plan whose tables are used with a layout: the pinned tables, or the newest of the lineage. For
// a layout that the spec does not want (yet), the tables in use stay, so that serving does not degrade before the
// layout is replaced. nil means the layout's own tables.
func (p *Planning) tablesFor(moed *semmoev1.MoEDeployment, workloads []*revisions.Workload, modelDigest, layout, inUse string) (*semmoev1.PlacementPlan, desired.Finding) {
	kept, pin := PlanWithDigest(inUse, p.InUse), p.PinnedTables
	switch {
	case moed.Spec.Placement.PlanRef == nil:
		tables, held := p.Lineage.tablesFor(moed, workloads, modelDigest, layout, inUse)
		if tables == nil && !isOf(p.Plan, layout) {
			tables = kept
		}
		return tables, held
	case pin != nil && pin.Spec.Current.PlanDigest == layout:
		if hold := holdTables(moed, workloads, pin); hold.Reason != "" && pin.Status.PlanDigest != inUse {
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
