"""The demo's own text: what the model summarises when it is given nothing, 2000 tokens with the request."""

from __future__ import annotations

REQUEST = "Summarise the following text in one short paragraph."

PARAGRAPHS = (
    "A short history of measuring time",
    "The first clock was the sky. Long before anyone wrote anything down, people knew that the Sun "
    "climbs, stands high and sinks, that the Moon grows and shrinks in a little under thirty days, and "
    "that the same stars return with the same season. Farmers sowed by these signs and sailors steered by "
    "them. What the sky did not give was a way to say how long a speech had lasted, or when exactly to "
    "meet.",
    "The Egyptians cut the day into smaller parts with a stick and its shadow. By 1500 BC they carried "
    "small sundials in the shape of a letter T, which were laid on the ground with the crossbar toward "
    "the Sun. The day between sunrise and sunset had twelve hours, in summer as in winter, so that an "
    "hour in June was longer than an hour in December. Nobody minded. The night had twelve hours as well, "
    "and priests counted them by the stars that rose one after another above the horizon.",
    "A sundial is useless at night, in the rain and indoors. Water was not. In a water clock a vessel "
    "with a small hole in the bottom empties at a known rate, and marks on its inside show how much time "
    "has passed. Courts in Athens gave each speaker a fixed amount of water, and a man who was "
    "interrupted could ask for the flow to be stopped. The difficulty is that water runs faster while the "
    "vessel is full and slower as it empties, and that cold water is thicker than warm water. Engineers "
    "in Alexandria, in Baghdad and in China spent centuries on floats, valves and gears that made the "
    "flow even. The greatest of them, Su Song, built a tower ten metres high in Kaifeng in 1088, whose "
    "water wheel turned a globe of the heavens and rang bells on the hour.",
    "Candles and incense were simpler. A candle with rings burns from one ring to the next in about the "
    "same time if it is kept out of the wind, and in Japan the hours in a temple were told by the smell, "
    "because each part of the incense was made of a different wood. Sand in a glass came late, in the "
    "fourteenth century, and went to sea at once, since the rolling of a ship does not disturb it. "
    "Sailors turned the glass every half hour and threw a log on a knotted rope behind the ship to "
    "measure its speed, which is still counted in knots.",
    "The mechanical clock appeared in Europe around 1300, first in monasteries, where prayers had to be "
    "said at fixed hours. A weight on a rope turns a wheel, and a device called the escapement lets the "
    "wheel advance by one tooth at a time. The tick of a clock is the sound of a tooth that is caught. "
    "These first clocks had no face and no hands; they only struck a bell, and the word clock comes from "
    "a word for bell. They were wrong by a quarter of an hour a day and had to be set by a sundial. Still "
    "they changed the towns that could afford one, because for the first time an hour was the same in "
    "summer and in winter, by day and by night, for the merchant and for the workman.",
    "The next step was taken by a student in Pisa. Around 1583 Galileo watched a lamp that swung from the "
    "ceiling of the cathedral, and timed it against his own pulse. Wide swings and narrow swings seemed "
    "to take the same time. As an old and blind man he described to his son how a pendulum might govern a "
    "clock, but they never finished it. In 1656 the Dutch scholar Christiaan Huygens did. His pendulum "
    "clock was wrong by less than a minute a day, and soon by less than ten seconds. Within a few years "
    "clocks all over Europe were altered to have a pendulum, and the minute hand, which had not been "
    "worth having before, became common.",
    "A pendulum does not work on a ship, and ships needed a clock more than anyone. A captain can find "
    "how far north he is from the height of the Sun at noon. To find how far east or west he is, he has "
    "to compare the local time with the time at home, and an error of one minute puts the ship wrong by "
    "up to twenty-eight kilometres. In 1707 four British warships ran onto the rocks of the Isles of "
    "Scilly because nobody knew where they were, and some fifteen hundred men drowned. Parliament then "
    "offered a prize of twenty thousand pounds, a fortune, for a method that would find the longitude to "
    "within half a degree.",
    "Astronomers believed that the answer was in the Moon, and made tables of its path among the stars. "
    "John Harrison, a carpenter from Yorkshire who had taught himself to make clocks out of wood, "
    "believed that it was in a better clock. He worked on it for more than forty years. His first three "
    "machines were large, with springs and balances that made up for each other's motion, and with strips "
    "of two metals that corrected for heat and cold. The fourth was a watch of thirteen centimetres. On a "
    "voyage to Jamaica in 1761 it lost five seconds in eighty-one days. The board that judged the prize "
    "contained many astronomers and was slow to be convinced; Harrison received the last of the money at "
    "the age of eighty, after the king had spoken for him. James Cook took a copy of the watch on his "
    "second voyage and called it a faithful guide.",
    "On land every town kept its own time by its own Sun, and noon in Bristol came ten minutes after noon "
    "in London. As long as the fastest thing on the road was a horse, this did not matter. The railways "
    "could not live with it. Trains on a single track that go by different clocks will sooner or later "
    "meet. British companies agreed on London time in the 1840s and sent it along the line by telegraph, "
    "while some towns kept a second minute hand on the church clock for the time of the place. In 1883 "
    "the railways of North America replaced fifty local times by a handful of zones, and a year later "
    "delegates of twenty-five nations met in Washington and chose the line through the observatory in "
    "Greenwich as the one from which all longitudes and all hours are counted.",
    "In the twentieth century the pendulum lost its place to something much smaller. A crystal of quartz "
    "bends a little when a voltage is applied to it, and if it is cut to the right shape it vibrates many "
    "thousands of times a second, very evenly. The first quartz clock, built in New Jersey in 1927, "
    "filled a room. By 1969 one fitted on the wrist, and a few years later it was cheaper than the strap. "
    "Quartz clocks showed something that astronomers had only suspected: the Earth itself is not a "
    "perfect clock. Its rotation is slowed by the tides and changes with the seasons and with the "
    "movements deep inside it, so that days differ by thousandths of a second.",
    "Atoms are better. An atom of caesium changes between two of its states when it is struck by radio "
    "waves of one exact frequency, and it does so in the same way in every country and in every year. "
    "Louis Essen and Jack Parry built the first reliable atomic clock near London in 1955. Since 1967 the "
    "second is no longer a fraction of the day; it is 9,192,631,770 periods of that radiation. Several "
    "hundred atomic clocks in some eighty institutes are averaged to make the time that the world agrees "
    "on, and now and then a leap second has been added to keep it in step with the turning Earth.",
    "Few people see such a clock, but almost everyone uses one each day. The satellites by which a "
    "telephone finds its way carry atomic clocks and do nothing but announce the time and their own "
    "position. Light travels thirty centimetres in a billionth of a second, so a clock that is wrong by a "
    "millionth of a second would put the telephone three hundred metres away from where it is. The clocks "
    "on the satellites even run a little faster than those on the ground, by thirty-eight millionths of a "
    "second a day, as Einstein's theories require, and they have to be corrected for it. Harrison's "
    "question, where am I, is still answered by asking what time it is.",
    "The newest clocks use light instead of radio waves and would be wrong by less than a second in the "
    "age of the universe. They are so exact that two of them show different times when one is lifted by a "
    "centimetre, because time passes more slowly where gravity is stronger. With such a clock one can "
    "measure the height of a mountain, or the water that moves below the ground. It is a long way from a "
    "stick and its shadow, and yet the purpose is the same: to find something that repeats itself evenly, "
    "and to count.",
)

TEXT = "\n\n".join(PARAGRAPHS)
