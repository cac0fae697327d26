// SPDX-License-Identifier: Apache-2.0

package wire

import "github.com/semmoe/operator/internal/router/jsonscan"

// maxBlockDepth is the maximum nesting of content blocks, such as the blocks of a tool result in a message.
const maxBlockDepth = 4

// mediaTypes are the types of blocks with images, documents and audio.
var mediaTypes = map[string]bool{
	`"image"`: true, `"document"`: true, `"input_image"`: true, `"input_file"`: true, `"input_audio"`: true,
}

// promptOfBlocks reads the prompt of a Messages or Responses request: the instructions, then the texts of all blocks,
// and the tools. It omits the text of the engine's chat template, like promptOf for chat completions.
func promptOfBlocks(b Body, instructions, items string) Prompt {
	var read blocks
	read.add(b.get(instructions), 0)
	read.add(b.get(items), 0)
	p := promptOfTexts(read.texts)
	p.Media = read.media
	p.addTools(b.get("tools"))
	return p
}

// blocks collects the content of messages.
type blocks struct {
	texts []string
	media Media
}

// add reads a string or a list of blocks. A message, or an item of a conversation, is read like a block.
func (r *blocks) add(content []byte, depth int) {
	if text, ok := jsonscan.String(content); ok {
		r.texts = append(r.texts, text)
		return
	}
	list, ok := jsonscan.Array(content, nil)
	if !ok || depth == maxBlockDepth {
		return
	}
	for _, at := range list {
		block := content[at.Start:at.End]
		body := ParseBody(block)
		if mediaTypes[string(body.get("type"))] {
			r.media.add(block)
			continue
		}
		for _, name := range []string{"name", "input", "arguments"} { // tool calls: arguments are an object in Messages, a string in Responses
			if text := callText(body.get(name)); text != "" {
				r.texts = append(r.texts, text)
			}
		}
		for _, name := range []string{"text", "content", "output"} {
			r.add(body.get(name), depth+1)
		}
	}
}
