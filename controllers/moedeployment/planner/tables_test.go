// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"testing"
	"time"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

// A wanted layout gets the tables that the spec wants with it. An outgoing layout keeps its tables in use.
func TestTablesFor(t *testing.T) {
	at := func(minutes int) time.Time { return moedtest.Start.Add(time.Duration(minutes) * time.Minute) }
	base, layout := moedtest.PlanOf("base", "b0", nil), replanOf("l1", "l1", "b0", semmoev1.TierLayout, at(3))
	next, unsolvedNext := moedtest.PlanOf("next", "b1", nil), moedtest.PlanOf("next", "b1", unsolved)
	t1, t2 := replanOf("t1", "t1", "b0", semmoev1.TierTables, at(1)), replanOf("t2", "t2", "b0", semmoev1.TierTables, at(2))
	ofNext := replanOf("t3", "t3", "b0", semmoev1.TierTables, at(2))
	ofNext.Labels[semmoev1.LabelBase] = "next"
	for name, tc := range map[string]struct {
		pinned, advisory bool
		// base is the plan of the spec, plan the wanted plan, and pin the pinned plan with new tables.
		base, plan, pin *semmoev1.PlacementPlan
		// made contains the plans made for drift, there the other existing plans.
		made, there   []*semmoev1.PlacementPlan
		layout, inUse string
		want, held    string
	}{
		"unknown base":                        {there: []*semmoev1.PlacementPlan{t1}, layout: "b0-full", inUse: "t1-full", want: "t1"},
		"the base is wanted":                  {base: base, plan: base, there: []*semmoev1.PlacementPlan{t1}, layout: "b0-full", inUse: "t1-full"},
		"the base with its new tables":        {base: base, plan: base, made: []*semmoev1.PlacementPlan{t1}, layout: "b0-full", want: "t1"},
		"their plan is deleted":               {base: base, plan: base, layout: "b0-full", inUse: "t1-full"},
		"another base is not solved":          {base: unsolvedNext, plan: unsolvedNext, there: []*semmoev1.PlacementPlan{t1}, layout: "b0-full", inUse: "t1-full", want: "t1"},
		"another base is solved":              {base: next, plan: next, there: []*semmoev1.PlacementPlan{t1}, layout: "b0-full", inUse: "t1-full", want: "t1"},
		"another base, nothing in use":        {base: next, plan: next, there: []*semmoev1.PlacementPlan{t1}, layout: "b0-full"},
		"another base, the plan is deleted":   {base: next, plan: next, layout: "b0-full", inUse: "t1-full"},
		"another base, on its canary":         {base: next, plan: next, there: []*semmoev1.PlacementPlan{t1}, layout: "b1-full"},
		"another base, newer tables":          {base: next, plan: next, made: []*semmoev1.PlacementPlan{ofNext}, there: []*semmoev1.PlacementPlan{t1}, layout: "b0-full", inUse: "t1-full", want: "t3"},
		"another base, newer tables wait":     {advisory: true, base: next, plan: next, made: []*semmoev1.PlacementPlan{ofNext}, there: []*semmoev1.PlacementPlan{t1}, layout: "b0-full", inUse: "t1-full", want: "t1", held: "Advisory"},
		"a layout after a drift":              {base: base, plan: layout, made: []*semmoev1.PlacementPlan{layout}, there: []*semmoev1.PlacementPlan{t1}, layout: "l1-full", inUse: "t1-full"},
		"invalid pin":                         {pinned: true, base: base, made: []*semmoev1.PlacementPlan{t1}, layout: "b0-full", inUse: "t1-full", want: "t1"},
		"invalid pin, nothing in use":         {pinned: true, base: base, made: []*semmoev1.PlacementPlan{t1}, layout: "b0-full"},
		"the pin is on its canary":            {pinned: true, base: base, plan: next, made: []*semmoev1.PlacementPlan{t1}, layout: "b0-full", inUse: "t1-full", want: "t1"},
		"the pin's own layout":                {pinned: true, base: base, plan: next, made: []*semmoev1.PlacementPlan{t1}, layout: "b1-full", inUse: "t1-full"},
		"the base is pinned":                  {pinned: true, base: base, plan: base, made: []*semmoev1.PlacementPlan{t1}, layout: "b0-full", inUse: "t1-full"},
		"tables are pinned":                   {pinned: true, base: base, plan: base, pin: t2, made: []*semmoev1.PlacementPlan{t1}, layout: "b0-full", inUse: "t1-full", want: "t2"},
		"pinned tables without approval":      {pinned: true, advisory: true, base: base, plan: base, pin: t2, made: []*semmoev1.PlacementPlan{t1}, layout: "b0-full", inUse: "t1-full", want: "t1", held: "Advisory"},
		"tables of another layout are pinned": {pinned: true, base: base, plan: next, pin: replanOf("t9", "t9", "b1", semmoev1.TierTables, at(2)), made: []*semmoev1.PlacementPlan{t1}, layout: "b0-full", inUse: "t1-full", want: "t1"},
	} {
		moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
			if tc.pinned {
				m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "pinned"}
			}
			if tc.advisory {
				m.Spec.Placement.Approval = semmoev1.ApprovalAdvisory
			}
		})
		p := Planning{ProfileName: "p", Base: tc.base, Plan: tc.plan, PinnedTables: tc.pin, Lineage: lineageOf(tc.base, nil, tc.made), InUse: append(tc.there, tc.made...)}
		if got, held := p.tablesFor(moed, nil, moedtest.Model, tc.layout, tc.inUse); nameOf(got) != tc.want || held.Reason != tc.held {
			t.Errorf("%s: the tables of %q, held %q; want %q, %q", name, nameOf(got), held.Reason, tc.want, tc.held)
		}
	}
}
