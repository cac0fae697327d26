package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/semmoe/operator/solver/trace/tracetest"
)

func TestDriftPrintsAlarmsAndDelays(t *testing.T) {
	shape := tracetest.Small
	shape.Experts, shape.Groups, shape.DocumentsPerDomain = 16, 4, 20
	path := created(t, tracetest.Generate(shape, 1))
	dir, _ := solved(t, "dp", "--trace", path, "--without-domains", "domain-3")
	flags := []string{"--trace", path, "--plan", dir, "--runs", "20", "--steps", "2000"}
	code, got, message := runJSON(t, newDriftCommand(), append(flags, "--domains", "domain-3", "--rate", "20", "--drop", "10,50")...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, message)
	}
	var report driftReport
	text, err := json.Marshal(got)
	if err == nil {
		err = json.Unmarshal(text, &report)
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Orders) != 2 || report.Orders[0].Sticky != 0 || report.Orders[1].Sticky != 0.9 {
		t.Fatalf("orders are %+v", report.Orders)
	}
	for _, order := range report.Orders {
		if order.Switch == nil || order.Switch.Unfound > 0 || order.Switch.Requests.P95 > 30 {
			t.Errorf("sticky %v: the switch is detected after %+v", order.Sticky, order.Switch)
		}
		// One of twenty requests per second is sampled.
		if len(order.Drops) != 2 || order.Drops[0].Percent != 10 || order.Drops[1].Percent != 50 {
			t.Fatalf("sticky %v: drops are %+v", order.Sticky, order.Drops)
		}
		small, large := order.Drops[0], order.Drops[1]
		if large.Requests.Median <= 0 || large.Requests.Median > small.Requests.Median || large.Requests.Median != large.Seconds.Median {
			t.Errorf("sticky %v: the drops are detected after %+v", order.Sticky, order.Drops)
		}
	}
	shape.Experts *= 2
	other := created(t, tracetest.Generate(shape, 1))
	for _, more := range [][]string{nil, {"--other-documents"}} {
		code, _, message := runJSON(t, newDriftCommand(), append([]string{"--trace", other, "--plan", dir}, more...)...)
		if code != exitInvalidFile || !strings.Contains(message, "experts") {
			t.Errorf("a trace of another model, %v: exit code %d, %q; want %d", more, code, message, exitInvalidFile)
		}
	}
	if code, got, _ = runJSON(t, newDriftCommand(), flags...); code != 0 {
		t.Fatalf("without domains: exit code %d", code)
	}
	if _, has := got["orders"].([]any)[0].(map[string]any)["switch"]; has {
		t.Error("a switch to no domain is reported")
	}
	_, fresh, _ := runJSON(t, newDriftCommand(), append(flags, "--other-documents")...)
	all, half := got["usual_requests"].(float64), fresh["usual_requests"].(float64)
	if from := fresh["calibration"].(map[string]any)["requests"].(float64); from < 0.4*all || from > 0.6*all || from+half != all {
		t.Errorf("of %v requests, a test calibrated on %v is evaluated on %v others", all, from, half)
	}
}

func TestDriftRefuses(t *testing.T) {
	path := created(t, tracetest.Generate(tracetest.Small, 1))
	dir, _ := solved(t, "dp", "--trace", path) // too few requests for a drift test
	shape := tracetest.Small
	shape.DocumentsPerDomain = 20
	enough := created(t, tracetest.Generate(shape, 1))
	tensor, _ := solved(t, "tp", "--trace", enough)
	for name, test := range map[string]struct {
		flags []string
		code  int
		want  string
	}{
		"no trace":      {[]string{"--plan", dir}, exitUsage, "--trace is missing"},
		"no plan":       {[]string{"--trace", path}, exitUsage, "--plan is missing"},
		"runs":          {[]string{"--trace", path, "--plan", dir, "--runs", "0"}, exitUsage, "--runs is 0"},
		"many runs":     {[]string{"--trace", path, "--plan", dir, "--runs", "100001"}, exitUsage, "--runs is 100001; allowed is 1 to 100000"},
		"sticky":        {[]string{"--trace", path, "--plan", dir, "--sticky", "1"}, exitUsage, "--sticky is 1"},
		"drop":          {[]string{"--trace", path, "--plan", dir, "--drop", "10,101"}, exitUsage, "--drop is 101"},
		"cap":           {[]string{"--trace", path, "--plan", dir, "--cap", "0.5"}, exitUsage, "--cap is 0.5"},
		"idle cap":      {[]string{"--trace", enough, "--plan", tensor, "--cap", "1.3"}, exitUsage, "--cap does not apply to this plan"},
		"no drift test": {[]string{"--trace", path, "--plan", dir}, exitInvalidFile, "drift.json"},
		"no directory":  {[]string{"--trace", path, "--plan", t.TempDir()}, exitInvalidFile, "manifest.json is missing"},
	} {
		code, _, message := runJSON(t, newDriftCommand(), test.flags...)
		if code != test.code || !strings.Contains(message, test.want) {
			t.Errorf("%s: exit code %d, %q; want %d and %q", name, code, message, test.code, test.want)
		}
	}
}
