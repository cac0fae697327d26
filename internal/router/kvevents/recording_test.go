// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"bufio"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// recordFile and recordAddress record the messages of a running engine:
//
//	go test ./internal/router/kvevents -run Record -count=1 -args -record FILE -address HOST:PORT [-record-for 30s]
//
// Send requests to the engine during the recording. TestRecordings decodes each file testdata/*.jsonl.
var (
	recordFile    = flag.String("record", "", "file for the messages of a running engine")
	recordAddress = flag.String("address", "", "host:port at which a rank of the engine publishes KV events")
	recordTime    = flag.Duration("record-for", 30*time.Second, "time to record")
)

// recorded is a line of a recording: the frames of a message.
type recorded struct {
	Frames [][]byte `json:"frames"`
}

func TestRecord(t *testing.T) {
	if *recordFile == "" {
		t.Skip("needs -args -record FILE -address HOST:PORT")
	}
	socket, err := dial(t.Context(), *recordAddress, "SUB", "PUB", "XPUB")
	if err != nil {
		t.Fatal(err)
	}
	defer socket.close()
	if err := socket.subscribe(""); err != nil {
		t.Fatal(err)
	}
	if err := socket.connection.SetReadDeadline(time.Now().Add(*recordTime)); err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(*recordFile)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	messages := 0
	for {
		frames, err := socket.receive()
		if os.IsTimeout(err) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := json.NewEncoder(file).Encode(recorded{frames}); err != nil {
			t.Fatal(err)
		}
		messages++
	}
	t.Logf("%d messages recorded to %s", messages, *recordFile)
}

// TestRecordings checks that all messages of recorded engines are decoded, in order, and fit an index.
func TestRecordings(t *testing.T) {
	files, err := filepath.Glob("testdata/*.jsonl")
	if err != nil || len(files) == 0 {
		t.Fatalf("no recordings, error %v", err)
	}
	for _, name := range files {
		t.Run(filepath.Base(name), func(t *testing.T) {
			file, err := os.Open(name)
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			r, done, most := newTestRank(0), changes{}, 0
			r.setLive(true)
			lines := bufio.NewScanner(file)
			lines.Buffer(nil, maxMessageBytes)
			var last uint64
			for n := 0; lines.Scan(); n++ {
				var message recorded
				if err := json.Unmarshal(lines.Bytes(), &message); err != nil {
					t.Fatal(err)
				}
				sequence, payload, err := parseMessage(message.Frames)
				if err != nil || n > 0 && sequence != last+1 {
					t.Fatalf("message %d after %d, error %v", sequence, last, err)
				}
				last = sequence
				events, number, err := decodeBatch(payload)
				if err != nil {
					t.Fatalf("message %d: %v", sequence, err)
				}
				if number != noRank {
					r.number = number
				}
				if err := r.apply(events, number, &done); err != nil {
					t.Fatalf("message %d: %v", sequence, err)
				}
				most = max(most, len(r.blocks))
			}
			if err := lines.Err(); err != nil {
				t.Fatal(err)
			}
			if done.stored == 0 || done.removed == 0 || done.orphans > 0 || done.ignored > 0 || most == 0 {
				t.Errorf("recording of %+v, up to %d blocks: it must have stored and removed blocks, without gaps", done, most)
			}
			t.Logf("%+v, up to %d blocks of %d tokens", done, most, r.size)
		})
	}
}
