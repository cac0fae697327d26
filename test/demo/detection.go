package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/drift"
)

// sampled is a request that a router has sampled, as the plan's test sees it.
type sampled struct {
	at time.Time
	drift.Sample
}

// sampledUnder reads what the request routers have sampled and scored under a plan with its own tables, in order of time. Each
// remembers the last 1,024.
func (d *demo) sampledUnder(ctx context.Context, planDigest string) ([]sampled, error) {
	var samples []sampled
	err := d.eachReport(ctx, func(report lar.Report) error {
		for _, o := range report.Observations {
			if o.Plan != planDigest || o.Forecast == nil || o.Forecast.Tables != planDigest || o.Total == 0 {
				continue
			}
			samples = append(samples, sampled{o.Time, drift.Sample{
				Best: o.Forecast.Best, Rank: o.Rank, Highest: o.Forecast.Highest, Predicted: o.Forecast.Predicted,
				Local: float64(o.Local) / float64(o.Total), Known: o.Forecast.Known, Pairs: o.Forecast.Pairs,
			}})
		}
		return nil
	})
	slices.SortStableFunc(samples, func(a, b sampled) int { return a.at.Compare(b.at) })
	return samples, err
}

// calibration reads what a plan judges the samples of its requests by.
func (d *demo) calibration(ctx context.Context, p *semmoev1.PlacementPlan) (*drift.Calibration, error) {
	held := &corev1.ConfigMap{}
	if err := d.read(ctx, held, "configmap", p.Status.ConfigMap); err != nil {
		return nil, err
	}
	text, has := held.Data[plan.DriftFile]
	if !has {
		return nil, fmt.Errorf("PlacementPlan %s has no test for drift: its profile has too few requests", p.Name)
	}
	calibration := &drift.Calibration{}
	if err := json.Unmarshal([]byte(text), calibration); err != nil {
		return nil, fmt.Errorf("ConfigMap %s: %s: %w", held.Name, plan.DriftFile, err)
	}
	return calibration, calibration.Validate()
}

// detection is what the test of a plan says of samples, some of which came after the traffic had changed.
type detection struct {
	// usual is the number of samples before the change, Falsely how many of them the test took for drift.
	usual, falsely int
	// changed is the number of samples after it, needed how many of them the test needed for its alarm; 0 where it raised none.
	changed, needed int
}

// detect runs the test along the samples; those after the time are of changed traffic.
func detect(calibration *drift.Calibration, samples []sampled, change time.Time) detection {
	var found detection
	var statistic drift.Statistic
	for _, s := range samples {
		statistic = calibration.Next(statistic, s.Sample)
		alarm := calibration.Drifted(statistic)
		if !s.at.After(change) {
			found.usual++
			if alarm {
				found.falsely++
			}
			continue
		}
		found.changed++
		if alarm && found.needed == 0 {
			found.needed = found.changed
		}
	}
	return found
}

// lastSample is when the last of the samples was taken.
func lastSample(samples []sampled) (time.Time, error) {
	if len(samples) == 0 {
		return time.Time{}, errors.New("the request routers have scored no request by the plan")
	}
	return samples[len(samples)-1].at, nil
}
