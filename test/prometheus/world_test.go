// SPDX-License-Identifier: Apache-2.0

package alerts

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"
	"github.com/prometheus/common/promslog"
	"github.com/prometheus/prometheus/config"
	"github.com/prometheus/prometheus/discovery/targetgroup"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/rules"
	"github.com/prometheus/prometheus/scrape"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/util/teststorage"
	"sigs.k8s.io/yaml"

	"github.com/semmoe/operator/test/load"
)

const (
	// step is the time by which the clock advances per round of scrapes. Rates over five minutes cover two rounds.
	step = 2 * time.Minute
	// pace is the minimum real time of a round on an idle machine, and the scrape timeout: Prometheus does not allow a longer
	// timeout.
	pace = 400 * time.Millisecond
)

// world is a Prometheus with a clock that advances by two minutes per round of scrapes, so that hours pass as fast as
// the targets answer.
type world struct {
	*rounds
	groups  []*rules.Group
	targets int
}

// newWorld starts a Prometheus that scrapes the targets of the jobs with the jobs' configurations.
func newWorld(t *testing.T, jobs []job) *world {
	t.Helper()
	store := teststorage.New(t)
	w := &world{rounds: newRounds(store, time.Now()), groups: loadedRules(t, store)}
	scraper, err := scrape.NewManager(&scrape.Options{DiscoveryReloadOnStartup: true, DiscoveryReloadInterval: model.Duration(10 * time.Millisecond)},
		promslog.NewNopLogger(), nil, w.rounds, nil, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	scaled := load.Scale(pace).Round(time.Millisecond).String()
	text := map[string]any{"global": map[string]any{"scrape_interval": scaled, "scrape_timeout": scaled}}
	var configs []any
	targets := map[string][]*targetgroup.Group{}
	for _, j := range jobs {
		j.config["job_name"] = j.name
		configs = append(configs, j.config)
		group := &targetgroup.Group{Source: j.name}
		for _, target := range j.targets {
			set := model.LabelSet{}
			for name, value := range target {
				set[model.LabelName(name)] = model.LabelValue(value)
			}
			group.Targets = append(group.Targets, set)
			w.targets++
		}
		targets[j.name] = []*targetgroup.Group{group}
	}
	text["scrape_configs"] = configs
	encoded, err := yaml.Marshal(text)
	if err != nil {
		t.Fatal(err)
	}
	loaded, err := config.Load(string(encoded), promslog.NewNopLogger())
	if err != nil {
		t.Fatalf("%v in:\n%s", err, encoded)
	}
	if err := scraper.ApplyConfig(loaded); err != nil {
		t.Fatal(err)
	}
	found := make(chan map[string][]*targetgroup.Group, 1)
	found <- targets
	ended := make(chan error, 1)
	go func() { ended <- scraper.Run(found) }()
	t.Cleanup(func() {
		w.end()
		scraper.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return w
}

// job is a scrape configuration with its targets from service discovery.
type job struct {
	name    string
	config  map[string]any
	targets []map[string]string
}

// round waits until each target has been scraped, evaluates the rules, and advances the clock. It returns the firing
// alerts.
func (w *world) round(t *testing.T) []string {
	t.Helper()
	if err := w.wait(w.targets, time.Minute); err != nil {
		t.Fatal(err)
	}
	alerts := firing(t, w.groups, w.time())
	w.next()
	return alerts
}

// rounds is a storage in which all scrapes of a round have the same timestamp. Each target is scraped once per round. A
// second scrape waits for the next round.
type rounds struct {
	storage *teststorage.TestStorage

	mu      sync.Mutex
	changed *sync.Cond
	now     time.Time
	ended   bool
	// seen holds the targets that have been scraped in this round, by job and instance.
	seen map[string]bool
}

func newRounds(storage *teststorage.TestStorage, begin time.Time) *rounds {
	r := &rounds{storage: storage, now: begin.Truncate(time.Minute), seen: map[string]bool{}}
	r.changed = sync.NewCond(&r.mu)
	return r
}

func (r *rounds) time() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now
}

// wait waits until the given number of targets has been scraped in this round.
func (r *rounds) wait(targets int, patience time.Duration) error {
	defer time.AfterFunc(patience, r.changed.Broadcast).Stop()
	deadline := time.Now().Add(patience)
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.seen) < targets {
		if !time.Now().Before(deadline) {
			return fmt.Errorf("within %s, only %d of %d targets were scraped: %s", patience, len(r.seen), targets, strings.Join(slices.Sorted(maps.Keys(r.seen)), ", "))
		}
		r.changed.Wait()
	}
	return nil
}

// next begins the next round.
func (r *rounds) next() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now = r.now.Add(step)
	clear(r.seen)
	r.changed.Broadcast()
}

// end releases all waiting scrapes.
func (r *rounds) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	r.changed.Broadcast()
}

// Appender returns an appender for one scrape.
func (r *rounds) Appender(ctx context.Context) storage.Appender {
	return &roundAppender{Appender: r.storage.Appender(ctx), rounds: r, at: r.time().UnixMilli()}
}

type roundAppender struct {
	storage.Appender
	rounds *rounds
	at     int64
	target string
}

// Append appends a sample with the time of the round.
func (a *roundAppender) Append(ref storage.SeriesRef, series labels.Labels, _ int64, value float64) (storage.SeriesRef, error) {
	if series.Get(labels.MetricName) == "up" {
		a.target = series.Get("job") + " " + series.Get("instance")
	}
	return a.Appender.Append(ref, series, a.at, value)
}

// Commit ends the target's scrape of this round.
func (a *roundAppender) Commit() error {
	err := a.Appender.Commit()
	r := a.rounds
	r.mu.Lock()
	defer r.mu.Unlock()
	if a.target == "" || a.at != r.now.UnixMilli() {
		return err
	}
	r.seen[a.target] = true
	r.changed.Broadcast()
	for a.at == r.now.UnixMilli() && !r.ended {
		r.changed.Wait()
	}
	return err
}
