// SPDX-License-Identifier: Apache-2.0

package alerts

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/common/promslog"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/promqltest"
)

// onSeriesCase holds series and the time at which an alert fires on them.
type onSeriesCase struct {
	// alert is the rule's name, severity and object, in the format of describe.
	alert  string
	series string
	// fires is the first step, within 200, at which the alert fires; -1 for never.
	fires int
	// seconds is the length of a step; 0 means a minute.
	seconds int
}

// onSeries contains series on which each rule fires and series on which it does not, at the boundaries of its
// expression and of its duration. Series are in steps, and "_" is a step without a sample.
var onSeries = map[string]onSeriesCase{
	"clients are refused": {alert: "SemMoENoServingPod critical a/m", series: `
		semmoe_router_backends{namespace="a",name="m",pod="r1"} 1x9 0x200
		semmoe_router_backends{namespace="a",name="m",pod="r2"} 1x9 0x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="503"} 0x10 3+3x200`, fires: 13},
	"one of two routers sees a pod": {alert: "SemMoENoServingPod critical a/m", series: `
		semmoe_router_backends{namespace="a",name="m",pod="r1"} 0x200
		semmoe_router_backends{namespace="a",name="m",pod="r2"} 1x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="503"} 0+3x200`, fires: -1},
	"no requests": {alert: "SemMoENoServingPod critical a/m", series: `
		semmoe_router_backends{namespace="a",name="m",pod="r1"} 0x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="503"} 7x200`, fires: -1},
	"busy engines answer 503": {alert: "SemMoENoServingPod critical a/m", series: `
		semmoe_router_backends{namespace="a",name="m",pod="r1"} 2x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="503"} 0+3x200`, fires: -1},

	"no replica is ready": {alert: "SemMoENoServingPod warning a/m", series: `
		semmoe_replicas{namespace="a",name="m",state="desired"} 2x200
		semmoe_replicas{namespace="a",name="m",state="ready"} 1x9 0x200`, fires: 40},
	"engines are loading": {alert: "SemMoENoServingPod warning a/m", series: `
		semmoe_replicas{namespace="a",name="m",state="desired"} 2x200
		semmoe_replicas{namespace="a",name="m",state="ready"} 0x29 1x200`, fires: -1},
	"scaled to zero": {alert: "SemMoENoServingPod warning a/m", series: `
		semmoe_replicas{namespace="a",name="m",state="desired"} 0x200
		semmoe_replicas{namespace="a",name="m",state="ready"} 0x200`, fires: -1},
	"the managers end": {alert: "SemMoENoServingPod warning a/m", series: `
		semmoe_replicas{namespace="a",name="m",state="desired"} 2x20
		semmoe_replicas{namespace="a",name="m",state="ready"} 0x20`, fires: -1},

	"not ready, and degraded": {alert: "SemMoENotReady critical a/m", series: `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Ready"} 1x9 0x200
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Degraded"} 0x9 1x200`, fires: 12, seconds: 5},
	"a replica is loading": {alert: "SemMoENotReady critical a/m", series: `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Ready"} 0x200
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Degraded"} 0x200`, fires: -1, seconds: 5},
	"degraded, but serving": {alert: "SemMoENotReady critical a/m", series: `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Ready"} 1x200
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Degraded"} 1x200`, fires: -1, seconds: 5},
	"a profile that is not ready": {alert: "SemMoENotReady critical a/m", series: `
		semmoe_condition{kind="AffinityProfile",namespace="a",name="m",type="Ready"} 0x200
		semmoe_condition{kind="AffinityProfile",namespace="a",name="m",type="Degraded"} 1x200`, fires: -1, seconds: 5},
	"not ready for half an hour": {alert: "SemMoENotReady warning a/m", series: `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Ready"} 1x9 0x200`, fires: 40},
	"ready again after 29 minutes": {alert: "SemMoENotReady warning a/m", series: `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Ready"} 1x9 0x29 1x100`, fires: -1},

	"2% are refused": {alert: "SemMoERouterShedding warning a/m", series: `
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="200"} 0+98x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="429"} 0+2x200`, fires: 6},
	"1% is refused": {alert: "SemMoERouterShedding warning a/m", series: `
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="200"} 0+99x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="429"} 0+1x200`, fires: -1},
	"a burst is refused": {alert: "SemMoERouterShedding warning a/m", series: `
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="200"} 0+98x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="429"} 0x50 80x150`, fires: -1},
	"no requests, no refusals": {alert: "SemMoERouterShedding warning a/m", series: `
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="200"} 5x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="429"} 0x200`, fires: -1},

	"degraded": {alert: "SemMoEDegraded warning a/m", series: `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Degraded"} 0x9 1x200
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Stalled"} 0x200`, fires: 25},
	"stalled, not degraded": {alert: "SemMoEDegraded warning a/m", series: `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Degraded"} 0x200
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Stalled"} 0x9 1x200`, fires: 25},
	"briefly degraded": {alert: "SemMoEDegraded warning a/m", series: `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Degraded"} 1x14 0 1x14 0 1x14 0x150`, fires: -1},
	"a degraded profile": {alert: "SemMoEDegraded warning a/m", series: `
		semmoe_condition{kind="AffinityProfile",namespace="a",name="m",type="Degraded"} 1x200`, fires: -1},

	"below target": {alert: "SemMoELocalityBelowTarget warning a/m", series: `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="LocalityOnTarget"} 1x9 0x200`, fires: 70},
	"below target, for 59 minutes": {alert: "SemMoELocalityBelowTarget warning a/m", series: `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="LocalityOnTarget"} 1x9 0x59 1x100`, fires: -1},
	"not measurable": {alert: "SemMoELocalityBelowTarget warning a/m", series: `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="LocalityOnTarget"} -1x200`, fires: -1},

	"drift rises": {alert: "SemMoEDriftRising info a/m", series: `
		semmoe_drift_statistic{namespace="a",name="m"} 0+1x200
		semmoe_drift_threshold{namespace="a",name="m"} 100x200`, fires: 81},
	"a temporary rise of drift": {alert: "SemMoEDriftRising info a/m", series: `
		semmoe_drift_statistic{namespace="a",name="m"} 0.1x20 0.7x25 0.1x150
		semmoe_drift_threshold{namespace="a",name="m"} 1x200`, fires: -1},
	"no drift test": {alert: "SemMoEDriftRising info a/m", series: `
		semmoe_plan_age_seconds{namespace="a",name="m"} 0+60x200`, fires: -1},

	"old, no drift statistic": {alert: "SemMoEPlanStale info a/m", series: `
		semmoe_plan_age_seconds{namespace="a",name="m"} 604200+60x200`, fires: 71},
	"old, with a drift statistic": {alert: "SemMoEPlanStale info a/m", series: `
		semmoe_plan_age_seconds{namespace="a",name="m"} 9e6+60x200
		semmoe_drift_statistic{namespace="a",name="m"} 0x200`, fires: -1},
	"old, drift statistic ended two hours ago": {alert: "SemMoEPlanStale info a/m", series: `
		semmoe_plan_age_seconds{namespace="a",name="m"} 9e6+60x200
		semmoe_drift_statistic{namespace="a",name="m"} 0x80`, fires: -1},
	"old, better than the baseline": {alert: "SemMoEPlanStale info a/m", series: `
		semmoe_plan_age_seconds{namespace="a",name="m"} 604200+60x200
		semmoe_lar_promised_ratio{namespace="a",name="m"} 0.3x200
		semmoe_lar_baseline_ratio{namespace="a",name="m"} 0.125x200`, fires: 71},
	"old, no better than the baseline": {alert: "SemMoEPlanStale info a/m", series: `
		semmoe_plan_age_seconds{namespace="a",name="m"} 604200+60x200
		semmoe_lar_promised_ratio{namespace="a",name="m"} 0.125x200
		semmoe_lar_baseline_ratio{namespace="a",name="m"} 0.125x200`, fires: -1},
	"recent": {alert: "SemMoEPlanStale info a/m", series: `
		semmoe_plan_age_seconds{namespace="a",name="m"} 500000+60x200`, fires: -1},

	"a third of the predicted time is saved": {alert: "SemMoEHardwareProfileWrong warning a/m", series: `
		semmoe_plan_predicted_over_measured_low{namespace="a",name="m"} 1x9 2.1x200
		semmoe_plan_predicted_over_measured_high{namespace="a",name="m"} 5x200`, fires: 40},
	"no time is saved": {alert: "SemMoEHardwareProfileWrong warning a/m", series: `
		semmoe_plan_predicted_over_measured_low{namespace="a",name="m"} 1e9x200
		semmoe_plan_predicted_over_measured_high{namespace="a",name="m"} 1e9x200`, fires: 30},
	"three times the predicted time is saved": {alert: "SemMoEHardwareProfileWrong warning a/m", series: `
		semmoe_plan_predicted_over_measured_low{namespace="a",name="m"} 0.2x200
		semmoe_plan_predicted_over_measured_high{namespace="a",name="m"} 1x9 0.49x200`, fires: 40},
	"nearly twice the predicted time may be saved": {alert: "SemMoEHardwareProfileWrong warning a/m", series: `
		semmoe_plan_predicted_over_measured_low{namespace="a",name="m"} 0.2x200
		semmoe_plan_predicted_over_measured_high{namespace="a",name="m"} 0.51x200`, fires: -1},
	"the interval is wide": {alert: "SemMoEHardwareProfileWrong warning a/m", series: `
		semmoe_plan_predicted_over_measured_low{namespace="a",name="m"} 1.9x200
		semmoe_plan_predicted_over_measured_high{namespace="a",name="m"} 1e9x200`, fires: -1},
	"a canary is wrong for half an hour": {alert: "SemMoEHardwareProfileWrong warning a/m", series: `
		semmoe_plan_predicted_over_measured_low{namespace="a",name="m"} 3x29 1x100`, fires: -1},

	"a canary for two hours": {alert: "SemMoERolloutStuck warning a/m", series: `
		semmoe_rollout_phase_start_time_seconds{namespace="a",name="m"} 0x200
		semmoe_rollout_soak_seconds{namespace="a",name="m"} 300x200`, fires: 126},
	"a canary that soaks for an hour": {alert: "SemMoERolloutStuck warning a/m", series: `
		semmoe_rollout_phase_start_time_seconds{namespace="a",name="m"} 0x200
		semmoe_rollout_soak_seconds{namespace="a",name="m"} 3600x200`, fires: -1},
	"a canary that soaks for ten minutes": {alert: "SemMoERolloutStuck warning a/m", series: `
		semmoe_rollout_phase_start_time_seconds{namespace="a",name="m"} 0x200
		semmoe_rollout_soak_seconds{namespace="a",name="m"} 600x200`, fires: 186},
	"a canary that soaks for a minute": {alert: "SemMoERolloutStuck warning a/m", series: `
		semmoe_rollout_phase_start_time_seconds{namespace="a",name="m"} 0x200
		semmoe_rollout_soak_seconds{namespace="a",name="m"} 60x200`, fires: 126},
	"a canary that is promoted": {alert: "SemMoERolloutStuck warning a/m", series: `
		semmoe_rollout_phase_start_time_seconds{namespace="a",name="m"} 0x100 6000x100
		semmoe_rollout_soak_seconds{namespace="a",name="m"} 300x200`, fires: -1},
	"a change of the spec": {alert: "SemMoERolloutStuck warning a/m", series: `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Reconciling"} 0x9 1x200`, fires: 70},
	"a completed change": {alert: "SemMoERolloutStuck warning a/m", series: `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Reconciling"} 1x55 0x145`, fires: -1},

	"no profile": {alert: "SemMoEProfilingFailed warning a/p", series: `
		semmoe_condition{kind="AffinityProfile",namespace="a",name="p",type="Degraded"} 0x9 1x200`, fires: 20},
	"a profile that succeeds after a retry": {alert: "SemMoEProfilingFailed warning a/p", series: `
		semmoe_condition{kind="AffinityProfile",namespace="a",name="p",type="Degraded"} 1x8 0x190`, fires: -1},
	"no plan": {alert: "SemMoEPlanningFailed warning a/q", series: `
		semmoe_condition{kind="PlacementPlan",namespace="a",name="q",type="Degraded"} 0x9 1x200`, fires: 20},
	"a plan that is deleted": {alert: "SemMoEPlanningFailed warning a/q", series: `
		semmoe_condition{kind="PlacementPlan",namespace="a",name="q",type="Degraded"} 1x4`, fires: -1},

	"nearly full": {alert: "SemMoEStoreFull warning s/store-0", series: `
		semmoe_store_free_bytes{namespace="s",pod="store-0"} 100-1x100
		semmoe_store_capacity_bytes{namespace="s",pod="store-0"} 800x200`, fires: 25},
	"a volume without statistics": {alert: "SemMoEStoreFull warning s/store-0", series: `
		semmoe_store_free_bytes{namespace="s",pod="store-0"} 0x200
		semmoe_store_capacity_bytes{namespace="s",pod="store-0"} 0x200`, fires: 5},
	"a full bucket": {alert: "SemMoEStoreFull warning s/store-0", series: `
		semmoe_store_requests_total{namespace="s",pod="store-0",operation="put",code="507"} 0x19 1x200`, fires: 25},
	"a bucket with room": {alert: "SemMoEStoreFull warning s/store-0", series: `
		semmoe_store_requests_total{namespace="s",pod="store-0",operation="put",code="507"} 0x200
		semmoe_store_requests_total{namespace="s",pod="store-0",operation="put",code="201"} 0+1x200`, fires: -1},
	"half full": {alert: "SemMoEStoreFull warning s/store-0", series: `
		semmoe_store_free_bytes{namespace="s",pod="store-0"} 400x200
		semmoe_store_capacity_bytes{namespace="s",pod="store-0"} 800x200`, fires: -1},

	"the store ends": {alert: "SemMoEStoreUnavailable warning ", series: `
		semmoe_store_available{pod="m1"} 1x9 0x200`, fires: 12, seconds: 5},
	"the store restarts": {alert: "SemMoEStoreUnavailable warning ", series: `
		semmoe_store_available{pod="m1"} 1x9 0 1x100`, fires: -1, seconds: 5},
	"no store": {alert: "SemMoEStoreUnavailable warning ", series: `up{job="other"} 1x200`, fires: -1, seconds: 5},

	"a damaged artifact is read": {alert: "SemMoEStoreCorrupt warning s/store-0", series: `
		semmoe_store_corrupt_reads_total{namespace="s",pod="store-0"} 0x19 1x200
		semmoe_store_corrupt_reads_total{namespace="s",pod="store-1"} 0x200`, fires: 25},
	"no damaged artifact": {alert: "SemMoEStoreCorrupt warning s/store-0", series: `
		semmoe_store_corrupt_reads_total{namespace="s",pod="store-0"} 0x200`, fires: -1},

	"no leader": {alert: "SemMoEOperatorAbsent warning ", series: `
		leader_election_master_status{name="manager.semmoe.io",pod="m1"} 1x9 0x200
		leader_election_master_status{name="manager.semmoe.io",pod="m2"} 0x200`, fires: 15},
	"no manager": {alert: "SemMoEOperatorAbsent warning ", series: `up{job="other"} 1x200`, fires: 5},
	"another lease has a leader": {alert: "SemMoEOperatorAbsent warning ", series: `
		leader_election_master_status{name="another",pod="m1"} 1x200`, fires: 5},
	"a permission is revoked": {alert: "SemMoEWatchRefused warning ", series: `
		semmoe_watch_refused{kind="Pod",pod="m1"} _x9 1x200
		semmoe_watch_refused{kind="Pod",pod="m2"} _x12 1x200`, fires: 11},
	"the permission is restored": {alert: "SemMoEWatchRefused warning ", series: `
		semmoe_watch_refused{kind="Pod",pod="m1"} 1x1 0x198`, fires: -1},

	"the other manager takes over": {alert: "SemMoEOperatorAbsent warning ", series: `
		leader_election_master_status{name="manager.semmoe.io",pod="m1"} 1x9 0x190
		leader_election_master_status{name="manager.semmoe.io",pod="m2"} 0x12 1x187`, fires: -1},
}

// firstStep returns the first step, within 200, at which the alert of a case fires with the rules of a file; -1 for
// never.
func firstStep(t *testing.T, file string, tc onSeriesCase) int {
	t.Helper()
	length := time.Duration(cmp.Or(tc.seconds, 60)) * time.Second
	groups := loadedFrom(t, promqltest.LoadedStorage(t, fmt.Sprintf("load %s\n%s", length, strings.TrimSpace(tc.series))), file)
	for step := range 200 {
		if slices.Contains(firing(t, groups, time.Unix(0, 0).Add(time.Duration(step)*length)), tc.alert) {
			return step
		}
	}
	return -1
}

// TestOutagesWithinAMinute adds the largest delays between an outage and its alert.
func TestOutagesWithinAMinute(t *testing.T) {
	// The leader checks the store every 10 s, and reports an outage of 20 s. Pods may wait 20 s for a node.
	const condition = 30 * time.Second
	monitors, err := os.ReadFile(filepath.Join(repository, "config", "monitoring", "monitors.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`honorLabels: true\n +interval: (\w+)`).FindSubmatch(monitors)
	if found == nil {
		t.Fatal("the ServiceMonitor of the managers has no interval")
	}
	scrape, err := time.ParseDuration(string(found[1]))
	if err != nil {
		t.Fatal(err)
	}
	groups, errs := rulefmt.ParseFile(alertsFile, false, model.UTF8Validation, expression, promslog.NewNopLogger())
	if len(errs) > 0 || groups.Groups[0].Name != "semmoe-outages" {
		t.Fatalf("%v: the first group is %q", errs, groups.Groups[0].Name)
	}
	for _, rule := range groups.Groups[0].Rules {
		if sum := condition + scrape + time.Duration(groups.Groups[0].Interval) + time.Duration(rule.For); sum > time.Minute {
			t.Errorf("%s may fire %v after the outage", rule.Alert, sum)
		}
	}
}

func TestAlertsOnSeries(t *testing.T) {
	// fires holds the rules that fire in some case, silent the rules that do not fire in some case.
	fires, silent := map[string]bool{}, map[string]bool{}
	for name, tc := range onSeries {
		rule := ruleOf(tc.alert)
		if tc.fires < 0 {
			silent[rule] = true
		} else {
			fires[rule] = true
		}
		t.Run(name, func(t *testing.T) {
			if first := firstStep(t, alertsFile, tc); first != tc.fires {
				t.Errorf("%s first fires at step %d, want %d", tc.alert, first, tc.fires)
			}
		})
	}
	for _, rule := range parsedRules(t) {
		key := rule.Alert + " " + rule.Labels["severity"]
		if !fires[key] || !silent[key] {
			t.Errorf("%s: has a case in which it fires: %v; has a case in which it does not: %v; want both", key, fires[key], silent[key])
		}
	}
}
