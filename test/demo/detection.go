// SPDX-License-Identifier: Apache-2.0

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

// sampled is a request that a router has sampled, as input of the plan's drift test.
type sampled struct {
	at time.Time
	drift.Sample
}

// sampledUnder reads the samples that the request routers scored under a plan with the tables of the same plan, in
// order of time. Each router keeps its last 1,024 samples.
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

// calibration reads the calibration of the plan's drift test.
func (d *demo) calibration(ctx context.Context, p *semmoev1.PlacementPlan) (*drift.Calibration, error) {
	held := &corev1.ConfigMap{}
	if err := d.read(ctx, held, "configmap", p.Status.ConfigMap); err != nil {
		return nil, err
	}
	text, has := held.Data[plan.DriftFile]
	if !has {
		return nil, fmt.Errorf("PlacementPlan %s has no drift test: its profile has too few requests", p.Name)
	}
	calibration := &drift.Calibration{}
	if err := json.Unmarshal([]byte(text), calibration); err != nil {
		return nil, fmt.Errorf("ConfigMap %s: %s: %w", held.Name, plan.DriftFile, err)
	}
	return calibration, calibration.Validate()
}

// detection is the result of the drift test on samples from before and after a change of the traffic.
type detection struct {
	// usual is the number of samples before the change, falsely the number of these at which the test raised an alarm.
	usual, falsely int
	// changed is the number of samples after the change, needed the number of these until the first alarm; 0 without an
	// alarm.
	changed, needed int
}

// detect runs the drift test on the samples in order. Samples after the time change are changed traffic.
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

// lastSample returns the time of the last sample.
func lastSample(samples []sampled) (time.Time, error) {
	if len(samples) == 0 {
		return time.Time{}, errors.New("the request routers have scored no request under the plan")
	}
	return samples[len(samples)-1].at, nil
}
